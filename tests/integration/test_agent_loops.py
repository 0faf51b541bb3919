"""veRL's agent loops with a scripted model: no Ray, no weights."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from psrl.agents import dataset, loops
from psrl.agents.env.base import EnvironmentFault
from psrl.errors import ConfigError, InputError
from psrl.tree import build_tree
from psrl.types import SampleBatch
from tests.helpers.games import WINNING, games_folder, textworld_task

pytest.importorskip("textworld", reason="needs the extra textworld")

REPOSITORY = Path(__file__).resolve().parents[2]
AGENTS = {entry.name: entry for entry in OmegaConf.load(REPOSITORY / "configs" / "agents.yaml")}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = [{"role": "system", "content": "You play a text game."}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["Action: take latchkey", "unlock safe with latchkey", "Commands: look"] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


class ScriptedServer:
    """Says what its script says for the number of assistant turns in the prompt; keeps every prompt."""

    def __init__(self, tokenizer: Any, script: Callable[[int, int], str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.request_ids: set[str] = set()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        call = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.params.append(sampling_params)
        self.request_ids.add(request_id)
        await asyncio.sleep(0)
        turn = self.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        ids = self.tokenizer.encode(self.script(turn, call) + "<|im_end|>", add_special_tokens=False)
        ids = ids[: sampling_params["max_tokens"]]
        fields = {"min_global_steps": 4, "max_global_steps": 4 + call}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields=fields)


def make_loop(
    tokenizer, server, entry="textworld", prompt_length=4000, response_length=2000, agents=None, **parameters
):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"prompt_length": prompt_length, "response_length": response_length}},
            "data": {},
            **({"agents": agents} if agents else {}),
        }
    )
    return hydra.utils.instantiate(
        {**AGENTS[entry], "environment_options": {}, **parameters},
        trainer_config=DictConfigWrap(config=config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen2",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )


def play(tokenizer, script, task=None, **options):
    server = ScriptedServer(tokenizer, script)

    async def run():
        loop = make_loop(tokenizer, server, **options)
        extra_info = {"index": 0, "task": json.dumps(task or textworld_task())}
        return await loop.run({"temperature": 1.0, "logprobs": True}, raw_prompt=PROMPT, extra_info=extra_info, index=0)

    return asyncio.run(run()), server


def winning(turn: int, call: int) -> str:
    return f"I know. \nAction: {WINNING[turn]}"


def fields(outputs, key: str) -> list[Any]:
    return [output.extra_fields[key] for output in outputs]


def rows(outputs) -> list[list[int]]:
    return [output.prompt_ids + output.response_ids for output in outputs]


def test_step_wise_outputs(tokenizer):
    outputs, server = play(tokenizer, winning, strategy="step")
    assert [output.num_turns for output in outputs] == [2, 4]
    assert fields(outputs, "psrl_step") == [0, 1]
    assert fields(outputs, "psrl_branch") == ["turn0", "turn1"]
    assert fields(outputs, "psrl_parent") == ["", "turn0"]
    assert fields(outputs, "psrl_return") == [1.0, 1.0]
    assert fields(outputs, "psrl_end") == ["done", "done"]
    assert fields(outputs, "max_global_steps") == [4, 5]
    assert [output.reward_score for output in outputs] == [1.0, 1.0]
    assert outputs[-1].extra_fields["reward_extra_info"] == {"success": 1.0, "turns": 2.0, "invalid_actions": 0.0}
    # What was sampled from is what is trained on, and nothing is tokenised twice.
    assert [output.prompt_ids for output in outputs] == server.prompts
    first = outputs[0].prompt_ids + outputs[0].response_ids
    assert outputs[1].prompt_ids[: len(first)] == first
    text = tokenizer.decode(outputs[1].prompt_ids)
    assert text.count("<|im_end|>\n<|im_start|>user\n") == 2 and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    for output in outputs:
        assert output.response_mask == [1] * len(output.response_ids)
        assert output.response_logprobs == [-0.5] * len(output.response_ids)
        output.as_dict()
    assert len(server.request_ids) == 1


def test_linear_output_masks_observations(tokenizer):
    [output], server = play(tokenizer, winning, strategy="linear")
    steps, _ = play(tokenizer, winning, strategy="step")
    assert rows([output]) == rows(steps[-1:])
    assert sum(output.response_mask) == sum(len(step.response_ids) for step in steps)
    assert [p for p, flag in zip(output.response_logprobs, output.response_mask, strict=True) if not flag] == [0.0] * (
        len(output.response_ids) - sum(output.response_mask)
    )
    assert (
        output.prompt_ids + output.response_ids[: len(server.prompts[1]) - len(output.prompt_ids)] == server.prompts[1]
    )
    assert server.params[0]["max_tokens"] == 128 and server.params[0]["temperature"] == 1.0


def test_histories_without_thoughts(tokenizer):
    outputs, server = play(tokenizer, winning, strategy="step_no_think")
    assert [output.prompt_ids for output in outputs] == server.prompts
    assert "I know." in tokenizer.decode(outputs[0].response_ids)
    assert "I know." not in tokenizer.decode(outputs[1].prompt_ids)
    assert "Action: take latchkey<|im_end|>" in tokenizer.decode(outputs[1].prompt_ids)


def test_window_keeps_the_first_observation(tokenizer):
    def look(turn: int, call: int) -> str:
        return "Action: look"

    outputs, server = play(tokenizer, look, strategy="step_window", window=1, max_turns=4)
    assert [output.prompt_ids for output in outputs] == server.prompts
    assert fields(outputs, "psrl_end") == ["max_turns"] * 4
    assert fields(outputs, "psrl_return") == [0.0] * 4
    for text in map(tokenizer.decode, (outputs[2].prompt_ids, outputs[3].prompt_ids)):
        assert text.startswith("<|im_start|>system\nYou play a text game.<|im_end|>\n<|im_start|>user\n")
        assert text.count("assistant\n") == 2 and "<|im_end|><|im_start|>" not in text and "\n\n<|im" not in text
    # Looking twice shows the same: the state is the same, though the history is longer.
    assert len(set(fields(outputs, "psrl_state")[1:])) == 1


@pytest.mark.parametrize("strategy", ["tree", "tree_step"])
def test_branches(tokenizer, strategy):
    def script(turn: int, call: int) -> str:
        # The trunk wins; what leaves it only looks, each branch with another thought.
        return f"{call}\nAction: {WINNING[turn] if call < 2 else 'look'}"

    outputs, server = play(
        tokenizer, script, strategy=strategy, branch_turns=[0, 1, 7], num_branches=2, max_turns=2, turn_penalty=0.25
    )
    assert len(server.request_ids) == 1
    scores = {output.reward_score for output in outputs}
    if strategy == "tree":
        assert fields(outputs, "psrl_return") == [0.5, -0.5, -0.5, -0.5, -0.5]
        assert fields(outputs, "psrl_step") == [1, 1, 1, 1, 1]
        # Three episodes leave at the task prompt, three pass through the trunk's first turn.
        assert fields(outputs, "psrl_parent") == ["turn0", "", "", "turn0", "turn0"]
        assert len({tuple(output.prompt_ids) for output in outputs}) == 1
        assert fields(outputs, "psrl_end") == ["done"] + ["max_turns"] * 4
    else:
        assert fields(outputs, "psrl_parent") == ["", "turn0", "", "turn2", "", "turn4", "turn0", "turn0"]
        assert fields(outputs, "psrl_step") == [0, 1, 0, 1, 0, 1, 1, 1]
        returns = [-0.25 + (0.75 - 0.25 - 0.25) / 3, 0.75, -0.5, -0.25, -0.5, -0.25, -0.25, -0.25]
        assert fields(outputs, "psrl_return") == pytest.approx(returns)
        assert sorted(output.prompt_ids for output in outputs) == sorted(server.prompts)
    assert scores == {(0.5 - 4 * 0.5) / 5}
    assert len(set(fields(outputs, "psrl_branch"))) == len(outputs)
    ids = rows(outputs)
    shared = build_tree(SampleBatch.from_lists(ids, [[0] * len(row) for row in ids]))
    assert shared.num_tokens < sum(map(len, ids)) / 2


def test_limits_end_an_episode_with_a_reason(tokenizer):
    outputs, _ = play(tokenizer, winning, strategy="step")
    first, second = (len(output.prompt_ids) for output in outputs)
    response = len(outputs[0].response_ids)

    short, _ = play(tokenizer, winning, strategy="step", prompt_length=second - 1)
    assert fields(short, "psrl_end") == ["prompt_length"] and short[0].reward_score == 0.0
    short, server = play(tokenizer, winning, strategy="linear", response_length=second - first)
    assert fields(short, "psrl_end") == ["response_length"] and len(short[0].response_ids) == response
    cut, server = play(tokenizer, winning, strategy="linear", response_length=second - first + 2)
    assert [params["max_tokens"] for params in server.params] == [min(128, second - first + 2), 2]
    assert len(cut[0].response_ids) == second - first + 2
    with pytest.raises(
        InputError, match=f"the first prompt has {first} tokens, the limits are prompt_length {first - 1}"
    ):
        play(tokenizer, winning, prompt_length=first - 1)


def test_invalid_actions_cost_and_are_told(tokenizer):
    def script(turn: int, call: int) -> str:
        return "no idea" if turn == 0 else f"Action: {WINNING[turn - 1]}"

    outputs, _ = play(tokenizer, script, strategy="tree_step", branch_turns=[1], num_branches=1,
                      invalid_action_penalty=0.5)  # fmt: skip
    assert fields(outputs, "psrl_return") == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert "That is not one of the commands.\nCommands: [" in tokenizer.decode(outputs[1].prompt_ids)
    assert outputs[-1].extra_fields["reward_extra_info"]["invalid_actions"] == 0.2


def test_environments_do_not_hold_up_the_event_loop(tokenizer, monkeypatch):
    threads, ticked = set(), threading.Event()
    make = loops.make_environment

    def slow(*args):
        threads.add(threading.current_thread().name)
        assert ticked.wait(60), "the event loop stands still"
        return make(*args)

    monkeypatch.setattr(loops, "make_environment", slow)
    server = ScriptedServer(tokenizer, winning)

    async def run():
        loop = make_loop(tokenizer, server)
        job = asyncio.ensure_future(loop.run({}, raw_prompt=PROMPT, extra_info={"task": textworld_task()}))
        ticks = 0
        while not job.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 10:
                ticked.set()
        return await job

    assert len(asyncio.run(run())) == 2
    assert all(name.startswith("psrl-environment") for name in threads)


def test_an_environment_that_does_not_repeat_itself_cannot_be_branched(tokenizer, monkeypatch):
    from psrl.agents.env.textworld import TextWorldEnvironment

    resets = []
    reset = TextWorldEnvironment.reset

    def unsteady(self, task):
        resets.append(task)
        shown = reset(self, task)
        return shown._replace(text=f"{shown.text} {len(resets)}")

    monkeypatch.setattr(TextWorldEnvironment, "reset", unsteady)
    with pytest.raises(EnvironmentFault, match="a branch cannot be made"):
        play(tokenizer, winning, strategy="tree", branch_turns=[0], num_branches=2)


def test_an_environment_is_not_closed_while_a_thread_is_in_it(tokenizer, monkeypatch):
    """One branch breaks while its sibling resets: closing the sibling's game then takes memory that the game uses."""
    from psrl.agents.env.textworld import TextWorldEnvironment

    resets, inside, closed_inside = [], set(), []
    second_is_in = threading.Event()
    reset, close = TextWorldEnvironment.reset, TextWorldEnvironment.close

    def slow(self, task):
        resets.append(self)
        number = len(resets)
        shown = reset(self, task)
        if number == 2:
            assert second_is_in.wait(60)
            return shown._replace(text="another text")
        if number == 3:
            inside.add(self)
            second_is_in.set()
            time.sleep(0.3)
            inside.discard(self)
        return shown

    def watched(self):
        closed_inside.append(self in inside)
        close(self)

    monkeypatch.setattr(TextWorldEnvironment, "reset", slow)
    monkeypatch.setattr(TextWorldEnvironment, "close", watched)
    with pytest.raises(EnvironmentFault, match="a branch cannot be made"):
        play(tokenizer, winning, strategy="tree", branch_turns=[0], num_branches=2)
    assert len(resets) == 3 and closed_inside and not any(closed_inside)


def test_search_branches_from_copies(tokenizer, tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra search")
    dataset.main(["search", "--out", str(tmp_path), "--train", "2", "--val", "1", "--people", "8"])
    row = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, OmegaConf.create({"cache_dir": str(tmp_path)}))[0]
    task = json.loads(row["extra_info"]["task"])

    def script(turn: int, call: int) -> str:
        return "Action: search[born]" if turn == 0 else f"Action: answer[{task['answers'][0] if call < 3 else '?'}]"

    outputs, _ = play(tokenizer, script, task=task, entry="search", strategy="tree", branch_turns=[1], num_branches=2)
    assert row["agent_name"] == "search" and row["raw_prompt"][0]["role"] == "system"
    assert fields(outputs, "psrl_return")[0] == 1.0 and sorted(fields(outputs, "psrl_return")) == [0.0, 1.0, 1.0]
    assert outputs[-1].extra_fields["reward_extra_info"]["success"] == pytest.approx(2 / 3)


def test_parameters_are_checked(tokenizer):
    async def make(**parameters):
        return make_loop(tokenizer, None, **parameters)

    def error(**parameters) -> str:
        with pytest.raises(ConfigError) as caught:
            try:
                asyncio.run(make(**parameters))
            except hydra.errors.InstantiationException as wrapped:
                raise wrapped.__cause__ from None
        return str(caught.value)

    assert "agent loop textworld has no key max_turn (it has: environment, " in error(max_turn=3)
    assert "strategy must be one of linear, step" in error(strategy="beam")
    assert "tree and tree_step need at least one" in error(strategy="tree")
    assert "num_branches is 0" in error(strategy="tree", branch_turns=[1])
    assert "max_turns must be at least 1, got 0" in error(max_turns=0)
    assert "a value has a wrong type" in error(max_turns="many")
    assert "agent loop textworld has no key strategi" in error(agents={"strategi": "tree"})


def test_the_command_line_overrides_all_loops(tokenizer):
    async def make():
        agents = {"strategy": "step_window", "window": 2}
        return [make_loop(tokenizer, None, entry=name, agents=agents).parameters for name in AGENTS]

    parameters = asyncio.run(make())
    assert [p.environment for p in parameters] == ["textworld", "alfworld", "search", "webshop"]
    assert {(p.strategy, p.window) for p in parameters} == {("step_window", 2)}


def test_a_row_without_a_task_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"extra_info.task: python -m psrl.agents.dataset"):
        loops.read_task({"index": 3})
    with pytest.raises(InputError, match="is not JSON"):
        loops.read_task({"task": "{"})


def test_dataset_rows_are_what_the_loops_play(tokenizer, tmp_path, monkeypatch):
    family = {"num_rooms": 2, "num_objects": 3, "quest_length": 2, "hidden_commands": ["look"], "max_turns": 1}
    monkeypatch.setitem(dataset.FAMILIES, "easy", family)
    (tmp_path / "games").symlink_to(games_folder())
    options = ["textworld", "--train", "1", "--val", "0", "--seed", "3", "--out"]
    dataset.main([*options, str(tmp_path)])
    first = (tmp_path / "train.parquet").read_bytes()
    dataset.main([*options, str(tmp_path)])
    assert (tmp_path / "train.parquet").read_bytes() == first
    row = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, OmegaConf.create({"cache_dir": str(tmp_path)}))[0]
    assert (row["agent_name"], row["data_source"], row["index"]) == ("textworld", "textworld", 0)

    server = ScriptedServer(tokenizer, lambda turn, call: "B")

    async def run():
        return await make_loop(tokenizer, server).run({}, **row)

    [output] = asyncio.run(run())
    prompt = tokenizer.decode(output.prompt_ids)
    assert "Reply with the letter of one command." in prompt and "\nA: " in prompt and ": look" not in prompt
    assert output.extra_fields["psrl_end"] == "max_turns"
