"""Sampling strategies on literal token ids, and what their samples share."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.agents.actions import token_span
from psrl.agents.strategies import (
    STRATEGIES,
    Limits,
    Opening,
    Strategy,
    Turn,
    TurnTree,
    make_strategy,
    path_return,
    sample_returns,
    turn_returns,
)
from psrl.errors import ConfigError
from psrl.tree import build_tree
from psrl.types import SampleBatch

REPOSITORY = Path(__file__).resolve().parents[2]


def turn(observation, response, boundary=(), trimmed=0, thought=(0, 0), logprobs=True):
    values = tuple(-id / 10 for id in response) if logprobs else None
    return Turn(Opening(tuple(observation), tuple(boundary), trimmed), tuple(response), values, thought)


def strategy(name: str) -> Strategy:
    return make_strategy(name, window=1 if name == "step_window" else None)


def chain(num_branches: int = 0) -> TurnTree:
    """Head 1 2; three turns whose observation is n0, whose response is n1 n2 (n1 is thought), closed by 9.

    Branches leave at the second turn.
    """
    tree = TurnTree((1, 2))
    node = tree.add(turn([10], [11, 12], thought=(0, 1)), -1, reward=0.5)
    root = node
    node = tree.add(turn([20], [21, 22], boundary=[9], thought=(0, 1)), node, reward=0.0)
    tree.add(turn([30], [31, 32], boundary=[9], thought=(0, 1)), node, reward=1.0)
    for branch in range(num_branches):
        tree.add(turn([20], [23 + branch], boundary=[9]), root, reward=0.25)
    return tree


def rows(name: str, tree: TurnTree):
    return [(sample.prompt_ids, sample.response_ids) for sample in strategy(name).samples(tree)]


def test_linear_has_one_sample_a_trajectory():
    [sample] = strategy("linear").samples(chain())
    assert sample.prompt_ids == [1, 2, 10]
    assert sample.response_ids == [11, 12, 9, 20, 21, 22, 9, 30, 31, 32]
    assert sample.response_mask == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.logprobs == [-1.1, -1.2, 0, 0, -2.1, -2.2, 0, 0, -3.1, -3.2]
    assert (sample.node, sample.step, sample.trained) == (2, 2, [0, 1, 2])


def test_step_has_one_sample_a_turn_with_the_full_history():
    assert rows("step", chain()) == [
        ([1, 2, 10], [11, 12]),
        ([1, 2, 10, 11, 12, 9, 20], [21, 22]),
        ([1, 2, 10, 11, 12, 9, 20, 21, 22, 9, 30], [31, 32]),
    ]
    last = strategy("step").samples(chain())[-1]
    assert (last.response_mask, last.logprobs, last.node, last.step, last.trained) == ([1, 1], [-3.1, -3.2], 2, 2, [2])


def test_step_window_keeps_the_task_prompt_and_the_last_turns():
    assert rows("step_window", chain()) == [
        ([1, 2, 10], [11, 12]),
        ([1, 2, 10, 11, 12, 9, 20], [21, 22]),
        ([1, 2, 20, 21, 22, 9, 30], [31, 32]),  # no 9 before 20: the response it closes is gone
    ]
    wide = make_strategy("step_window", window=2)
    assert [s.prompt_ids for s in wide.samples(chain())] == [p for p, _ in rows("step", chain())]


def test_step_no_think_drops_earlier_thoughts_from_the_history_only():
    assert rows("step_no_think", chain()) == [
        ([1, 2, 10], [11, 12]),
        ([1, 2, 10, 12, 9, 20], [21, 22]),
        ([1, 2, 10, 12, 9, 20, 22, 9, 30], [31, 32]),
    ]


def test_tree_has_one_sample_a_leaf():
    tree = chain(num_branches=2)
    assert rows("tree", tree) == [
        ([1, 2, 10], [11, 12, 9, 20, 21, 22, 9, 30, 31, 32]),
        ([1, 2, 10], [11, 12, 9, 20, 23]),
        ([1, 2, 10], [11, 12, 9, 20, 24]),
    ]
    assert [sample.step for sample in strategy("tree").samples(tree)] == [2, 1, 1]
    assert [tree.fork(sample.node) for sample in strategy("tree").samples(tree)] == [0, 0, 0]


def test_tree_step_has_every_turn_once():
    assert rows("tree_step", chain(num_branches=2)) == [
        *rows("step", chain()),
        ([1, 2, 10, 11, 12, 9, 20], [23]),
        ([1, 2, 10, 11, 12, 9, 20], [24]),
    ]


def test_tokens_that_the_template_takes_back_leave_the_history_but_not_the_step_that_sampled_them():
    tree = TurnTree((1,))
    node = tree.add(turn([10], [11, 12]), -1)
    tree.add(turn([20], [21], trimmed=1), node)
    assert rows("step", tree) == [([1, 10], [11, 12]), ([1, 10, 11, 20], [21])]
    [sample] = strategy("linear").samples(tree)
    assert (sample.response_ids, sample.response_mask) == ([11, 20, 21], [1, 0, 1])
    assert sample.logprobs == [-1.1, 0.0, -2.1]


def test_log_probs_are_absent_where_a_turn_has_none():
    tree = TurnTree((1,))
    node = tree.add(turn([10], [11]), -1)
    tree.add(turn([20], [21], logprobs=False), node)
    assert strategy("linear").samples(tree)[0].logprobs is None
    assert [sample.logprobs for sample in strategy("step").samples(tree)] == [[-1.1], None]


def test_returns_of_turns_and_leaves():
    tree = chain(num_branches=2)
    # Leaves 1, 0.25, 0.25; the second trunk turn leads to 1; the first to the mean of 1, 0.25, 0.25, plus its own 0.5.
    assert turn_returns(tree) == [1.0, 1.0, 1.0, 0.25, 0.25]
    first = 0.5 + 0.5 * (0.5 + 0.25 + 0.25) / 3
    assert turn_returns(tree, discount=0.5) == pytest.approx([first, 0.5, 1.0, 0.25, 0.25])
    assert [path_return(tree, leaf) for leaf in tree.leaves()] == [1.5, 0.75, 0.75]
    for name, expected in (("tree", [1.5, 0.75, 0.75]), ("tree_step", [1.0, 1.0, 1.0, 0.25, 0.25])):
        assert sample_returns(strategy(name), tree, strategy(name).samples(tree)) == expected


def test_room_names_the_limit_that_binds():
    turns = chain().turns
    limits = Limits(prompt_length=7, response_length=6)
    rooms = {name: [strategy(name).room((1, 2), turns[:t], turns[t].opening, limits) for t in range(3)]
             for name in ("linear", "step")}  # fmt: skip
    assert rooms["linear"] == [(6, "response_length"), (2, "response_length"), (0, "response_length")]
    assert rooms["step"] == [(6, "response_length"), (6, "response_length"), (0, "prompt_length")]
    short = Limits(prompt_length=9, response_length=6, model_length=8)
    assert strategy("step").room((1, 2), turns[:1], turns[1].opening, short) == (1, "model_length")


def test_strategies_are_checked():
    with pytest.raises(ConfigError, match="strategy must be one of linear, step"):
        make_strategy("beam")
    with pytest.raises(ConfigError, match="step_window needs window"):
        make_strategy("step_window")
    with pytest.raises(ConfigError, match="window is for the strategy step_window"):
        make_strategy("step", window=3)
    with pytest.raises(ValueError, match="thought span"):
        turn([1], [2], thought=(0, 2))


def match_rate(name: str, tree: TurnTree) -> float:
    samples = strategy(name).samples(tree)
    ids = [sample.prompt_ids + sample.response_ids for sample in samples]
    unique = build_tree(SampleBatch.from_lists(ids, [[0] * len(row) for row in ids])).num_tokens
    return 1 - unique / sum(map(len, ids))


def test_what_the_samples_share():
    plain, branched = chain(), chain(num_branches=2)
    assert match_rate("linear", plain) == 0.0
    # 5 + 9 + 13 tokens, the last row holds them all.
    assert match_rate("step", plain) == 1 - 13 / 27
    assert match_rate("step_window", plain) < match_rate("step", plain)
    assert match_rate("step_no_think", plain) < match_rate("step", plain)
    assert match_rate("tree", branched) == 1 - 15 / 29
    assert match_rate("tree_step", branched) > match_rate("tree", branched)


ids_of = st.lists(st.integers(0, 50), min_size=1, max_size=4).map(tuple)


@st.composite
def trees(draw, branches: bool = False):
    tree = TurnTree(draw(ids_of))
    for node in range(draw(st.integers(1, 7))):
        parent = draw(st.integers(-1 if branches else node - 1, node - 1)) if node else -1
        response = draw(ids_of)
        start = draw(st.integers(0, len(response)))
        span = (start, draw(st.integers(start, len(response))))
        boundary = draw(st.lists(st.integers(0, 50), max_size=1)) if parent >= 0 else []
        tree.add(turn(draw(ids_of), response, boundary, thought=span), parent, draw(st.sampled_from([0.0, 1.0])))
    return tree


@given(trees(branches=True))
def test_a_prompt_is_a_prefix_of_the_next_ones(tree):
    samples = make_strategy("tree_step").samples(tree)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            before = samples[parent].prompt_ids + samples[parent].response_ids
            assert samples[node].prompt_ids[: len(before)] == before


@given(trees())
def test_step_samples_are_pieces_of_the_linear_sample(tree):
    [whole] = make_strategy("linear").samples(tree)
    ids = whole.prompt_ids + whole.response_ids
    mask = [0] * len(whole.prompt_ids) + whole.response_mask
    trained = []
    for sample in make_strategy("step").samples(tree):
        row = sample.prompt_ids + sample.response_ids
        assert row == ids[: len(row)]
        trained += range(len(sample.prompt_ids), len(row))
    assert trained == [i for i, flag in enumerate(mask) if flag]


@given(trees(branches=True), st.sampled_from(STRATEGIES))
def test_samples_are_whole_and_within_the_room_that_was_promised(tree, name):
    chosen = strategy(name)
    samples = chosen.samples(tree)
    assert {node for sample in samples for node in sample.trained} == set(range(len(tree.turns)))
    for sample in samples:
        assert len(sample.response_ids) == len(sample.response_mask) == len(sample.logprobs)
        sampled = [id for node in sample.trained for id in tree.turns[node].response_ids]
        assert [id for id, flag in zip(sample.response_ids, sample.response_mask, strict=True) if flag] == sampled
        *past, last = [tree.turns[node] for node in tree.path(sample.node)]
        limits = Limits(len(sample.prompt_ids), len(sample.response_ids))
        assert chosen.room(tree.head_ids, past, last.opening, limits).num_tokens == len(last.response_ids)
        # An agent was sampled with the ids that it is trained on.
        prompt = chosen.prompt(tree.head_ids, past, last.opening)
        row = sample.prompt_ids + sample.response_ids
        assert row == [*prompt, *last.response_ids]


def test_token_span_keeps_straddling_tokens_outside():
    pieces = ["Th", "ink.", "\nAct", "ion:", " go"]
    decode = lambda ids: "".join(pieces[i] for i in ids)  # noqa: E731
    assert token_span(range(5), decode, (0, 6)) == (0, 2)
    assert token_span(range(5), decode, (0, 7)) == (0, 2)  # "\n" is in a token with the action
    assert token_span(range(5), decode, (0, 0)) == (0, 0)
    assert token_span(range(5), decode, (2, 6)) == (1, 2)
    assert token_span(range(5), decode, (3, 6)) == (2, 2)  # "ink." straddles the start


@pytest.mark.parametrize("module", ["strategies", "actions", "episode", "env", "parameters"])
def test_module_imports_without_torch(module: str):
    absent = ["torch", "transformers", "verl", "ray", "textworld"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import psrl.agents.{module}"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
