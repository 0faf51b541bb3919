"""Plays of a dataset's tasks in the prompts and the action format of the job."""

import random
from pathlib import Path

import pytest

from psrl.agents.actions import action_format
from psrl.agents.dataset import make_row, write_rows
from psrl.agents.env import Observation
from psrl.errors import InputError
from tests.helpers.games import WINNING, textworld_task

pytest.importorskip("textworld", reason="needs the extra textworld")
from psrl.agents.oracle_traces import oracle_rows, play_task, reply_for


def test_replies_are_read_as_their_action():
    shown = Observation("Where?", admissible=("go east", "go west"))
    assert reply_for("go west", shown, action_format("menu")) == "B"
    assert reply_for("go west", shown, action_format("line")) == "I try this next.\nAction: go west"
    with pytest.raises(InputError, match="'go up' is none of the actions that are offered: go east, go west"):
        reply_for("go up", shown, action_format("menu"))


def test_the_oracle_wins():
    task = {**textworld_task(), "action_format": "line"}
    messages, reward = play_task(task, [{"role": "system", "content": "Play."}], 0.0, random.Random(0))
    assert reward == 1.0
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert [messages[turn]["content"].split("Action: ")[1] for turn in (2, 4)] == WINNING


def test_rows_of_a_dataset(tmp_path: Path):
    task = textworld_task(hidden_commands=["examine", "look", "inventory", "go"], max_turns=3)
    data = write_rows([make_row("textworld", task, 0, "train", "menu")], tmp_path / "train.parquet")
    rows = list(oracle_rows(data, 4, 1.0, seed=5))
    assert rows == list(oracle_rows(data, 4, 1.0, seed=5))
    assert [(row["task"], row["trial"]) for row in rows] == [("textworld-3", trial) for trial in range(4)]
    assert rows[0]["messages"][0]["content"] == "You play a text game. Reply with the letter of one command."
    assert all(len(row["messages"]) <= 7 and len(row["messages"][-1]["content"]) == 1 for row in rows)
    write_rows([make_row("search", {}, 0, "train", "line")], tmp_path / "other.parquet")
    with pytest.raises(InputError, match="row 0 is of 'search': only textworld has an oracle"):
        list(oracle_rows(tmp_path / "other.parquet", 1, 0.0, seed=0))
