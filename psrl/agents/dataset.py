"""Tasks as Parquet files that veRL reads: ``python -m psrl.agents.dataset textworld --out DIR --train N --val M``.

Writes ``train.parquet`` and ``val.parquet``. A row has veRL's columns ``data_source``, ``prompt``, ``agent_name``,
``ability``, ``reward_model`` and ``extra_info``, whose ``task`` is the environment's part as JSON text. The same
options give the same rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from psrl.agents.actions import ACTION_FORMATS, action_format

SPLITS = ("train", "val")

_PROMPTS = {
    "textworld": "You play a text game.",
    "alfworld": "You act in a household. Every turn shows an observation and the commands that are possible.",
    "search": (
        "Answer the question. The command search[words] shows documents, answer[text] gives the answer and ends the "
        "task."
    ),
    "webshop": (
        "You shop in a web store. Find and buy what the instruction asks for, with the commands search[words] and "
        "click[button]."
    ),
}

FAMILIES: dict[str, dict[str, Any]] = {
    # One room, two right commands in a row, one to four to choose from.
    "tiny": {
        "num_rooms": 1,
        "num_objects": 3,
        "quest_length": 2,
        "hidden_commands": ["examine", "look", "inventory", "drop", "insert", "put"],
        "max_turns": 2,
    },
    # One room, two right commands, one mistake allowed, two to ten to choose from: a random player wins one in eight.
    "easy": {
        "num_rooms": 1,
        "num_objects": 4,
        "quest_length": 2,
        "hidden_commands": ["examine", "look", "inventory"],
        "max_turns": 3,
    },
    "medium": {"num_rooms": 3, "num_objects": 6, "quest_length": 4, "hidden_commands": ["examine"]},
    "hard": {"num_rooms": 6, "num_objects": 12, "quest_length": 8, "hidden_commands": []},
}
"""TextWorld games by difficulty."""


def make_row(environment: str, task: Mapping[str, Any], index: int, split: str, format_name: str) -> dict[str, Any]:
    """One row: the environment's task, and the system prompt that goes with the action format."""
    system_prompt = f"{_PROMPTS[environment]} {action_format(format_name).instructions}"
    task_text = json.dumps({**task, "action_format": format_name}, ensure_ascii=False, sort_keys=True)
    return {
        "data_source": environment,
        "agent_name": environment,
        "prompt": [{"role": "system", "content": system_prompt}],
        "ability": "agent",
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {"index": index, "split": split, "task": task_text},
    }


def write_rows(rows: Iterable[Mapping[str, Any]], file: Path) -> Path:
    """Write a Parquet file; it appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    pd.DataFrame(list(rows)).to_parquet(partial, index=False)
    partial.replace(file)
    return file


def textworld_tasks(options: argparse.Namespace, number: int, count: int) -> list[dict[str, Any]]:
    """Tasks of games ``seed + number …``; makes the games below ``out/games``."""
    from psrl.agents.games import GameSpec

    family = FAMILIES[options.family]
    games = (options.out / "games").resolve()
    size = {key: family[key] for key in ("num_rooms", "num_objects", "quest_length")}
    seeds = range(options.seed + number, options.seed + number + count)
    with ProcessPoolExecutor(max_workers=options.workers) as pool:
        for done, _ in enumerate(pool.map(_make_game, [(GameSpec(seed=s, **size), games) for s in seeds]), start=1):
            print(f"\r{done} of {count} games", end="" if done < count else "\n", file=sys.stderr)
    return [{"seed": seed, "games": str(games), **family} for seed in seeds]


def _make_game(job: tuple[Any, Path]) -> None:
    from psrl.agents.games import ensure_game

    ensure_game(*job)


def alfworld_tasks(options: argparse.Namespace, number: int, count: int) -> list[dict[str, Any]]:
    """Tasks of the games below ``--games``, in the order of their paths.

    Raises:
        ValueError: there are fewer.
    """
    files = sorted(options.games.resolve().rglob("game.tw-pddl"))[number : number + count]
    if len(files) < count:
        raise ValueError(f"--games {options.games} has too few game.tw-pddl files: {number + len(files)}")
    return [{"game_file": str(file)} for file in files]


def search_tasks(options: argparse.Namespace, number: int, count: int) -> list[dict[str, Any]]:
    """Questions about one made-up world, whose documents go to ``out/corpus.jsonl``.

    Raises:
        ValueError: the world has fewer questions.
    """
    import random

    from psrl.agents.facts import make_world

    world = make_world(options.seed, options.people)
    questions = [question for question in world.questions if question.num_hops <= options.hops]
    random.Random(f"split/{options.seed}").shuffle(questions)
    chosen = questions[number : number + count]
    if len(chosen) < count:
        raise ValueError(f"a world of {options.people} people has {len(questions)} questions: raise --people")
    corpus = (options.out / "corpus.jsonl").resolve()
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.write_text("".join(json.dumps(document) + "\n" for document in world.documents), encoding="utf-8")
    return [
        {"question": q.question, "answers": [q.answer], "num_hops": q.num_hops, "corpus": str(corpus)} for q in chosen
    ]


def webshop_tasks(options: argparse.Namespace, number: int, count: int) -> list[dict[str, Any]]:
    """Goals ``seed + number …`` of the server."""
    return [{"goal": goal} for goal in range(options.seed + number, options.seed + number + count)]


_TASKS = {
    "textworld": textworld_tasks,
    "alfworld": alfworld_tasks,
    "search": search_tasks,
    "webshop": webshop_tasks,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m psrl.agents.dataset", description="Write tasks that veRL reads.")
    commands = parser.add_subparsers(dest="environment", required=True)
    for name in _TASKS:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
        command.add_argument("--train", type=int, default=16, help="training tasks (default 16)")
        command.add_argument("--val", type=int, default=4, help="validation tasks (default 4)")
        command.add_argument("--seed", type=int, default=0, help="first game or goal, or the world (default 0)")
        command.add_argument(
            "--action-format",
            choices=list(ACTION_FORMATS),
            help="how actions are asked for (default menu for tiny and easy games, else line)",
        )
        if name == "textworld":
            command.add_argument("--family", choices=list(FAMILIES), default="easy", help="difficulty (default easy)")
            command.add_argument("--workers", type=int, default=2, help="processes that make games (default 2)")
        if name == "alfworld":
            command.add_argument("--games", type=Path, required=True, help="folder with game.tw-pddl files")
        if name == "search":
            command.add_argument("--people", type=int, default=60, help="size of the world (default 60)")
            command.add_argument("--hops", type=int, choices=(1, 2, 3), default=3, help="at most (default 3)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("train", "val"):
        if getattr(options, name) < (1 if name == "train" else 0):
            parser.error(f"--{name} is too small: {getattr(options, name)}")
    short = options.environment == "textworld" and options.family in ("tiny", "easy")
    format_name = options.action_format or ("menu" if short else "line")
    number = 0
    for split in SPLITS:
        count = getattr(options, split)
        if not count:
            continue
        try:
            tasks = _TASKS[options.environment](options, number, count)
        except ValueError as error:
            parser.error(str(error))
        rows = [
            make_row(options.environment, task, i, split, format_name) for i, task in enumerate(tasks, start=number)
        ]
        print(write_rows(rows, options.out / f"{split}.parquet"))
        number += count


if __name__ == "__main__":
    main()
