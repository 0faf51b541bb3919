"""Traces of real TextWorld games: their form, their branches, and that the same options give the same bytes."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psrl.agents.textworld_traces import GameSpec, TextWorldPlayer, TurnState, generate, main, make_game, observation


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def actions_of(row: dict[str, Any]) -> list[str]:
    return [m["content"] for m in row["messages"] if m["role"] == "assistant"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Step and tree rows of one game."""
    files = generate(tmp_path_factory.mktemp("traces"), num_tasks=1, num_trials=3, num_branches=4, seed=101)
    step_file, tree_file = files
    assert (step_file.name, tree_file.name) == ("textworld_step.jsonl.gz", "textworld_tree.jsonl.gz")
    return read(step_file), read(tree_file)


def test_rows_are_chats_that_end_with_an_action(traces):
    steps, trees = traces
    assert [(row["task"], row["trial"]) for row in steps] == [("textworld-101", trial) for trial in range(3)]
    for row in steps + trees:
        roles = [message["role"] for message in row["messages"]]
        num_turns = len(roles) // 2
        assert roles == ["system"] + ["user", "assistant"] * num_turns
        assert 1 <= num_turns <= 16
        assert row["reward"] in (0.0, 1.0)
        for message in row["messages"][1::2]:
            assert message["content"].splitlines()[-1].startswith("Commands: [")
            assert "$$" not in message["content"] and "\n>" not in message["content"]


def test_actions_are_among_the_offered_commands(traces):
    for row in traces[0] + traces[1]:
        for offer, action in zip(row["messages"][1::2], row["messages"][2::2], strict=True):
            offered = offer["content"].rsplit("Commands: [", 1)[1].rstrip("]").split(", ")
            assert action["content"].rsplit("Action: ", 1)[1] in offered


def test_branches_leave_their_parent_at_the_branch_turn(traces):
    trees = traces[1]
    assert [row["trial"] for row in trees] == [0, 1, 2, 3, 4]
    assert (trees[0]["parent"], trees[0]["branch_turn"]) == (None, 0)
    for row in trees[1:]:
        parent, turn = trees[row["parent"]], row["branch_turn"]
        shared = 2 + 2 * turn  # system prompt, the turns in common, the observation before the branch
        assert row["messages"][:shared] == parent["messages"][:shared]
        assert row["messages"][shared] != parent["messages"][shared]
    # No two episodes are the same, nor is one the beginning of another.
    plays = [actions_of(row) for row in trees]
    assert not any(i != j and plays[j][: len(play)] == play for i, play in enumerate(plays) for j in range(len(plays)))


def test_the_oracle_wins(tmp_path: Path):
    game = make_game(GameSpec(seed=101), tmp_path)
    with TextWorldPlayer(game, max_turns=20) as player:
        won = player.play(lambda state, forbidden: state.oracle_commands[0])
        cut = player.play(lambda state, forbidden: "look")
    assert (won.reward, len(won.actions)) == (1.0, 6)
    assert (cut.reward, cut.actions) == (0.0, ["look"] * 20)


def test_observation_drops_banner_prompt_and_status_line():
    text = "  $$ TITLE\n\nFind the key. \n\n-= Hall =-\nA hall.\n\n>           -= Hall =-0/1"
    state = TurnState(text, "Find the key.", ["go east", "look"], ["go east"], won=False)
    assert observation(state, first=True) == "Find the key.\n-= Hall =-\nA hall.\nCommands: [go east, look]"


def test_the_same_options_give_the_same_bytes(tmp_path: Path):
    """Two processes with different string hashes."""
    options = ["--tasks", "1", "--trials", "1", "--branches", "1"]
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "psrl.agents.textworld_traces", "--out", str(tmp_path / seed), *options]
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).resolve().parents[2]
        )
    for name in ("textworld_step.jsonl.gz", "textworld_tree.jsonl.gz"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [
        "textworld_step.jsonl.gz",
        "textworld_tree.jsonl.gz",
    ]


@pytest.mark.parametrize(
    "option",
    ["--tasks=0", "--trials=0", "--max-turns=0", "--objects=0", "--quest-length=0", "--branches=-1", "--epsilon=1.5"],
)
def test_refuses_options_out_of_range(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), option])
    assert option.split("=")[0] in capsys.readouterr().err
