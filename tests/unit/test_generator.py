"""The generator against transformers: greedy text, log-probs of a full forward, independence of batch and cache."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from psrl.errors import ConfigError, InputError, RolloutError, UnsupportedError
from psrl.models.stacked_experts import one_by_one
from psrl.rollout.generator import Generator
from psrl.rollout.kv_buffer import load_model
from psrl.rollout.prefix_cache import PrefixCache
from psrl.rollout.requests import Generation
from psrl.rollout.sampling import SamplingParams, sample_tokens
from tests.helpers import make_checkpoint

EOS = 2
WIDE = {"dtype": torch.float64, "experts_implementation": "eager"}
"""transformers' own product of experts has no float64."""


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen3_moe", "llama"])
def folder(request, tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, tied=request.param == "llama")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", layers=2)


def generator(folder: str, dtype: torch.dtype = torch.float32, **options) -> Generator:
    return Generator(load_model(folder, dtype), eos_token_ids=[EOS], **options)


def prompts(num: int, seed: int = 0, low: int = 1, high: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 128, rng.integers(low, high)).tolist() for _ in range(num)]


def plain_log_probs(folder: str, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **WIDE)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_greedy_is_that_of_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, **WIDE)
    asked = prompts(5)
    params = SamplingParams(temperature=0, max_tokens=12)
    answers = generator(folder, torch.float64).generate((str(i), p, params) for i, p in enumerate(asked))
    for prompt, answer in zip(asked, answers, strict=True):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert answer.token_ids == want[len(prompt) :].tolist()
        assert answer.stop_reason == ("stop" if answer.token_ids[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_a_full_forward(folder, temperature):
    asked = prompts(6, seed=1)
    params = SamplingParams(temperature=temperature, max_tokens=20)
    answers = generator(folder).generate((str(i), p, params) for i, p in enumerate(asked))
    for prompt, answer in zip(asked, answers, strict=True):
        want = plain_log_probs(folder, prompt, answer.token_ids, temperature or 1.0)
        assert torch.allclose(torch.tensor(answer.log_probs).double(), want, atol=1e-5)


@pytest.mark.parametrize("options", [
    {}, {"max_num_seqs": 1}, {"max_num_seqs": 3}, {"max_prefill_tokens": 7}, {"max_prefill_tokens": 1},
    {"prefix_cache_bytes": 0}, {"prefix_cache_bytes": 5000},
])  # fmt: skip
def test_a_response_does_not_depend_on_its_company(qwen2, options):
    asked = [(str(i), p, SamplingParams(max_tokens=3 + 5 * (i % 4))) for i, p in enumerate(prompts(9, seed=2))]
    alone = [generator(qwen2).generate([request])[0] for request in asked]
    together = generator(qwen2, **options).generate(asked)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    assert len({tuple(a.token_ids) for a in alone}) > 5


def test_requests_that_join_later(qwen2):
    asked = [(str(i), p, SamplingParams(max_tokens=8)) for i, p in enumerate(prompts(6, seed=3))]
    want = generator(qwen2).generate(asked)
    engine = generator(qwen2, max_num_seqs=4)
    handles, finished = [], {}
    for request in asked:
        handles.append(engine.submit(*request))
        finished |= engine.step()
    while not engine.is_idle:
        finished |= engine.step()
    assert [finished[handle].token_ids for handle in handles] == [a.token_ids for a in want]


def test_random_numbers_come_from_request_and_seed(qwen2):
    (prompt,) = prompts(1, low=10)
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def run(request_id: str, seed: int = 0, params: SamplingParams = params) -> list[int]:
        return generator(qwen2, seed=seed).generate([(request_id, prompt, params)])[0].token_ids

    assert run("a") == run("a")
    assert run("a") != run("b")
    assert run("a") != run("a", seed=1)
    own = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    assert run("a", params=own) == run("b", params=own) == run("a", seed=5, params=own)  # with a seed of its own
    assert run("a", params=own) != run("a", params=dataclasses.replace(own, seed=2))


# ---------------------------------------------------------------------------------------------------- prefix reuse
def turns(engine: Generator, folder: str, num_turns: int = 4) -> list[Generation]:
    """An agent's session: each prompt is the last one, its response and an observation."""
    history, answers = prompts(1, seed=4, low=20)[0], []
    for turn in range(num_turns):
        answers += engine.generate([(f"s{turn}", history, SamplingParams(max_tokens=6, ignore_eos=True))])
        want = plain_log_probs(folder, history, answers[-1].token_ids)
        assert torch.allclose(torch.tensor(answers[-1].log_probs).double(), want, atol=1e-5)
        history = history + answers[-1].token_ids + [5, 6, 7, turn + 8]
    return answers


def test_a_session_reuses_its_history(folder):
    with_cache, without = generator(folder), generator(folder, prefix_cache_bytes=0)
    reused, plain = turns(with_cache, folder), turns(without, folder)
    assert [a.token_ids for a in reused] == [a.token_ids for a in plain]
    first = len(prompts(1, seed=4, low=20)[0])
    # All but the last token of each response, whose K/V nobody has computed yet.
    assert [a.num_cached_tokens for a in reused] == [0, first + 5, first + 15, first + 25]
    assert {a.num_cached_tokens for a in plain} == {0}
    assert with_cache.stats.cached_tokens == 3 * first + 45


def test_equal_prompts_are_computed_once(qwen2):
    prompt = prompts(1, seed=5, low=25)[0]
    engine = generator(qwen2)
    answers = engine.generate((str(i), prompt, SamplingParams(max_tokens=4)) for i in range(8))
    assert [a.num_cached_tokens for a in answers] == [0] + [len(prompt) - 1] * 7
    assert len({tuple(a.token_ids) for a in answers}) > 1


def test_the_cache_keeps_to_its_budget_and_frees_what_was_used_least_recently(qwen2):
    model = load_model(qwen2, torch.float32)
    token_bytes = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head size, float32
    engine = Generator(model, prefix_cache_bytes=40 * token_bytes)
    a, b, c = ([t] * 17 for t in (10, 20, 30))
    one = SamplingParams(max_tokens=1)

    def cached(prompt: list[int]) -> int:
        (answer,) = engine.generate([("r", prompt, one)])
        assert engine.cached_bytes <= 40 * token_bytes
        return answer.num_cached_tokens

    assert [cached(a), cached(b), cached(a), cached(c), cached(a), cached(b)] == [0, 0, 16, 0, 16, 0]
    engine.clear_cache()
    assert engine.cached_bytes == 0 == cached(a)


def test_prefix_cache_splits_where_sequences_part():
    cache = PrefixCache(1 << 20)

    def insert(*ids: int) -> None:
        kv = torch.tensor(ids, dtype=torch.float32)[None, None, None, :, None]
        cache.insert(np.array(ids), lambda start, end: (kv[..., start:end, :].clone(),), 4)

    def match(*ids: int) -> list[float]:
        return [x for piece in cache.match(np.array(ids)) for x in piece[0].flatten().tolist()]

    insert(1, 2, 3, 4)
    insert(1, 2, 5)
    insert(1, 2)
    insert(9)
    assert cache.num_bytes == 4 * 6
    assert match(1, 2, 3, 4, 5) == [1, 2, 3, 4]
    assert match(1, 2, 5, 6) == [1, 2, 5]
    assert match(1, 7) == [1]
    assert match(8) == [] and match(9, 9) == [9]
    assert cache.match_length(np.array([1, 2, 3])) == 3


# ---------------------------------------------------------------------------------------------------------- routes
@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", layers=2)


def test_routes_are_those_of_a_full_forward(experts):
    """Of every token but the last, whether it was computed now or kept from an earlier request."""
    engine = generator(experts, torch.float64, record_routes=True, max_prefill_tokens=16)
    asked = prompts(4)
    answers = engine.generate((str(i), prompt, SamplingParams(max_tokens=5 + i)) for i, prompt in enumerate(asked))
    asked += [prompt + answer.token_ids + [9] for prompt, answer in zip(asked, answers, strict=True)]
    answers += engine.generate((f"{prompt}", prompt, SamplingParams(max_tokens=4)) for prompt in asked[4:])
    assert answers[-1].num_cached_tokens > 0
    model = AutoModelForCausalLM.from_pretrained(experts, **WIDE)
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        want = torch.stack([x.topk(2).indices for x in model(ids, output_router_logits=True).router_logits], 1)[:-1]
        assert answer.experts.dtype == torch.int16 and answer.experts.shape == (ids.shape[1] - 1, 2, 2)
        assert torch.equal(answer.experts.sort().values.long(), want.sort().values)


def test_routes_of_what_is_aborted(experts):
    engine = generator(experts, record_routes=True)
    handle = engine.submit("r", [5, 6, 7], SamplingParams(max_tokens=9))
    engine.step()
    answer = engine.abort_all()[handle]
    assert answer.experts.shape == (2 + len(answer.token_ids), 2, 2)


def test_routes_of_a_model_without_experts_are_refused(qwen2):
    assert generator(qwen2).generate([("r", [5], SamplingParams())])[0].experts is None
    with pytest.raises(UnsupportedError, match="enable_rollout_routing_replay=True, but the model has no experts"):
        generator(qwen2, record_routes=True)


# -------------------------------------------------------------------------------------------------------- sampling
def test_stop_tokens_and_limits(qwen2):
    prompt = prompts(1, seed=6, low=10)[0]
    greedy = {"temperature": 0, "ignore_eos": True}
    free = generator(qwen2).generate([("r", prompt, SamplingParams(max_tokens=8, **greedy))])[0]
    assert (len(free.token_ids), free.stop_reason) == (8, "length")
    stop = free.token_ids[3]
    ended = generator(qwen2).generate(
        [("r", prompt, SamplingParams(max_tokens=8, stop_token_ids=frozenset([stop]), **greedy))]
    )[0]
    first = free.token_ids.index(stop)
    assert (ended.token_ids, ended.stop_reason) == (free.token_ids[: first + 1], "stop")
    full = generator(qwen2, max_model_len=len(prompt) + 2).generate([("r", prompt, SamplingParams(max_tokens=8))])[0]
    assert (len(full.token_ids), full.stop_reason) == (2, "length")


def test_top_k_and_top_p_draw_from_what_is_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]

    def draws(**options) -> dict[int, float]:
        found: dict[int, float] = {}
        for u in np.linspace(0, 0.999, 101):
            (token,), (log_prob,) = sample_tokens(logits, [SamplingParams(**options)], [u])
            found[token] = round(float(np.exp(log_prob)), 4)
        return found

    assert draws() == {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    assert draws(top_k=2) == {0: 0.5714, 1: 0.4286}
    assert draws(top_p=0.65) == {0: 0.5714, 1: 0.4286}
    assert draws(top_p=0.75) == {0: 0.4444, 1: 0.3333, 2: 0.2222}
    assert draws(top_k=2, top_p=0.5) == {0: 1.0}
    assert draws(temperature=0) == {0: 0.4}
    assert draws(temperature=0.5) == {0: 0.5333, 1: 0.3, 2: 0.1333, 3: 0.0333}
    assert torch.equal(logits, torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None])


def test_frequencies_are_the_probabilities(qwen2):
    prompt = prompts(1, seed=7, low=10)[0]
    engine = generator(qwen2)
    params = SamplingParams(max_tokens=1, temperature=0.7)
    answers = engine.generate((f"r{i}", prompt, params) for i in range(2000))
    counts = np.bincount([a.token_ids[0] for a in answers], minlength=128)
    probs = {a.token_ids[0]: np.exp(a.log_probs[0]) for a in answers}
    token, p = max(probs.items(), key=lambda item: item[1])
    assert abs(counts[token] / 2000 - p) < 4 * np.sqrt(p * (1 - p) / 2000)


def test_parameters_of_verl():
    got = SamplingParams.from_mapping(
        {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": None,
         "stop_token_ids": [7], "stop": None, "n": 1, "min_p": 0.0},
        max_tokens=33,
    )  # fmt: skip
    assert got == SamplingParams(0.5, 0.9, -1, 33, frozenset([7]))
    assert SamplingParams.from_mapping({"max_new_tokens": 5}, max_tokens=33).max_tokens == 5


@pytest.mark.parametrize(
    "bad",
    [{"repetition_penalty": 1.1}, {"min_p": 0.1}, {"n": 2}, {"stop": ["x"]}, {"guided_json": {"a": 1}},
     {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 0}, {"prompt_logprobs": 1}],
)  # fmt: skip
def test_unsupported_parameters_are_refused_by_name(bad):
    with pytest.raises(UnsupportedError, match=next(iter(bad))):
        SamplingParams.from_mapping(bad, max_tokens=4)


# --------------------------------------------------------------------------------------------------------- the rest
def test_bad_requests(qwen2):
    engine = generator(qwen2, max_model_len=8)
    for prompt, reason in (([], "at least one"), ([128], "0 .. 127"), ([-1], "0 .. 127"), ([5] * 8, "max_model_len 8")):
        with pytest.raises(InputError, match=reason):
            engine.submit("r", prompt, SamplingParams())
    with pytest.raises(ConfigError, match="max_num_seqs"):
        generator(qwen2, max_num_seqs=0)
    assert engine.is_idle


def test_abort_returns_what_there_is(qwen2):
    asked = [(str(i), p, SamplingParams(max_tokens=9, ignore_eos=True)) for i, p in enumerate(prompts(3, seed=8))]
    want = generator(qwen2).generate(asked)
    engine = generator(qwen2, max_num_seqs=2)
    handles = [engine.submit(*request) for request in asked]
    for _ in range(3):
        assert engine.step() == {}
    aborted = engine.abort_all()
    assert engine.is_idle
    assert [aborted[h].stop_reason for h in handles] == ["aborted"] * 3
    assert [aborted[h].token_ids for h in handles] == [want[0].token_ids[:4], want[1].token_ids[:4], []]
    assert engine.generate(asked[2:])[0].token_ids == want[2].token_ids


def test_new_weights_answer_and_old_prefixes_are_forgotten(folder, tmp_path):
    kind = AutoModelForCausalLM.from_pretrained(folder).config.model_type
    other = make_checkpoint(tmp_path, kind, tied=kind == "llama", seed=1)
    asked = [("r", [7] * 20, SamplingParams(max_tokens=8))]
    engine = generator(folder)
    old = engine.generate(asked)[0]
    state = dict(one_by_one(dict(AutoModelForCausalLM.from_pretrained(other).named_parameters())))
    assert ("model.layers.1.mlp.experts.3.down_proj.weight" in state) == (kind == "qwen3_moe")
    assert ("lm_head.weight" in state) == (kind != "llama")
    names = list(state)
    engine.begin_update()
    for part in (names[:3], names[3:]):
        engine.load_weights((name, state[name]) for name in part)
    assert engine.finish_update() == len(names)
    new = engine.generate(asked)[0]
    assert new == generator(other).generate(asked)[0] != old
    assert new.num_cached_tokens == 0


def test_incomplete_or_foreign_weights_are_errors(qwen2):
    state = dict(AutoModelForCausalLM.from_pretrained(qwen2).named_parameters())
    engine = generator(qwen2)
    engine.begin_update()
    engine.load_weights((name, tensor) for name, tensor in state.items() if name != "model.norm.weight")
    with pytest.raises(RolloutError, match=r"no values for model\.norm\.weight"):
        engine.finish_update()
    with pytest.raises(RolloutError, match="being replaced"):
        engine.generate([("r", [5], SamplingParams())])
    engine.abort_all()
    for name, tensor in (("model.foo", torch.zeros(1)), ("model.norm.weight", torch.zeros(3))):
        engine.begin_update()
        with pytest.raises(RolloutError, match=name):
            engine.load_weights([(name, tensor)])
    engine.begin_update()
    engine.load_weights(state.items())
    engine.finish_update()
    assert engine.generate([("r", [5], SamplingParams())])[0].token_ids


def test_weights_do_not_change_under_a_request(qwen2):
    engine = generator(qwen2)
    engine.submit("r", [5, 6], SamplingParams())
    with pytest.raises(RolloutError, match="1 requests"):
        engine.begin_update()


def test_logits_that_are_not_finite_are_an_error(qwen2):
    engine = generator(qwen2)
    engine.begin_update()
    engine.load_weights(
        (name, tensor * float("nan") if name == "model.norm.weight" else tensor)
        for name, tensor in AutoModelForCausalLM.from_pretrained(qwen2).named_parameters()
    )
    engine.finish_update()
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([("r", [5, 6], SamplingParams())])
