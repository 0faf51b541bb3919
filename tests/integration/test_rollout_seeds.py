"""What an agent loop's requests draw is a function of its prompt's name and session, so that a job can be repeated."""

from types import SimpleNamespace

from omegaconf import OmegaConf

from psrl.agents.loops import Draws, EnvironmentAgentLoop


def draws(row: dict, **rollout) -> Draws | None:
    loop = SimpleNamespace(rollout_config=OmegaConf.create(rollout))
    return EnvironmentAgentLoop._draws(loop, row)  # pyright: ignore[reportArgumentType]


def seeds(row: dict, prompts: list[list[int]], **rollout) -> list[int]:
    drawn = draws(row, **{"name": "hf", **rollout})
    assert drawn is not None
    return [drawn.seed(prompt) for prompt in prompts]


def test_the_same_session_draws_the_same():
    row = {"uid": "00000003-000001", "session_id": 1}
    prompts = [[1, 2], [1, 2, 3], [1, 2], [12]]
    first = seeds(row, prompts)
    assert seeds(row, prompts) == first
    assert len(set(first)) == 4  # a prompt that comes up again is a branch of its own
    assert all(0 <= seed < 2**63 for seed in first)
    for other in ({**row, "session_id": 0}, {**row, "uid": "00000004-000001"}):
        assert not set(seeds(other, prompts)) & set(first)
    assert not set(seeds(row, prompts, seed=7)) & set(first)


def test_whose_requests_have_seeds():
    row = {"uid": "a", "session_id": 0}
    assert draws(row, name="hf") is not None
    assert draws(row, name="vllm") is None
    assert draws(row, name="vllm", full_determinism=True) is not None
    assert draws({}, name="hf") is None
