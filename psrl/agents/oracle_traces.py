"""Winning plays of a dataset's TextWorld tasks as chat rows, for ``psrl sft`` before a job on the same tasks.

``python -m psrl.agents.oracle_traces DATA.parquet --out FILE.jsonl.gz`` plays every task of the file with the prompts
and the action format that the agent loop uses, so the model learns to answer in the form that the job reads. With
``--epsilon`` some answers are random ones, so that the model still has something to learn. The same options give the
same rows. Needs the ``textworld`` extra.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from psrl.agents.actions import ActionFormat, action_format
from psrl.agents.env.base import Observation
from psrl.agents.env.textworld import TextWorldEnvironment
from psrl.agents.textworld_traces import write_rows
from psrl.errors import InputError

DEFAULT_MAX_TURNS = 16


def reply_for(action: str, observation: Observation, how: ActionFormat) -> str:
    """A reply that the format reads as the action.

    Raises:
        InputError: there is none: the action is not offered.
    """
    candidates = [*string.ascii_uppercase, f"I try this next.\nAction: {action}"]
    for candidate in candidates if how.name == "menu" else candidates[-1:]:
        if how.read(candidate, observation).action == action:
            return candidate
    raise InputError(f"{action!r} is none of the actions that are offered: {', '.join(observation.admissible or ())}")


def play_task(
    task: Mapping[str, Any], prompt: Sequence[Mapping[str, str]], epsilon: float, rng: random.Random
) -> tuple[list[dict[str, str]], float]:
    """Play a task; returns the messages, the last of which is the last action, and the reward.

    Args:
        task: of the dataset row.
        prompt: messages before the first observation.
        epsilon: probability of an action drawn from those offered in place of the oracle's.
    """
    environment = TextWorldEnvironment()
    how = action_format(task["action_format"])
    messages = [dict(message) for message in prompt]
    try:
        shown, reward, num_turns = environment.reset(task), 0.0, 0
        while not shown.done and num_turns < task.get("max_turns", DEFAULT_MAX_TURNS):
            action = environment.oracle_commands[0] if environment.oracle_commands else ""
            if not action or rng.random() < epsilon:
                action = rng.choice(shown.admissible or ())
            messages.append({"role": "user", "content": how.render(shown)})
            messages.append({"role": "assistant", "content": reply_for(action, shown, how)})
            shown = environment.step(action)
            reward, num_turns = reward + shown.reward, num_turns + 1
    finally:
        environment.close()
    return messages, reward


def oracle_rows(data: Path, num_trials: int, epsilon: float, seed: int) -> Iterator[dict[str, Any]]:
    """Chat rows, trials of a task after one another.

    Raises:
        InputError: a row of the file is no TextWorld task.
    """
    for number, row in enumerate(pd.read_parquet(data).to_dict("records")):
        if row.get("data_source") != "textworld":
            raise InputError(f"{data}: row {number} is of {row.get('data_source')!r}: only textworld has an oracle")
        task = json.loads(row["extra_info"]["task"])
        name = f"textworld-{task['seed']}"
        for trial in range(num_trials):
            rng = random.Random(f"{seed}/{name}/{trial}")
            messages, reward = play_task(task, list(row["prompt"]), epsilon, rng)
            yield {"task": name, "trial": trial, "reward": reward, "messages": messages}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m psrl.agents.oracle_traces", description="Play a dataset's TextWorld tasks for psrl sft."
    )
    parser.add_argument("data", type=Path, help="Parquet file of psrl.agents.dataset")
    parser.add_argument("--out", type=Path, required=True, help="file to write, *.jsonl.gz")
    parser.add_argument("--trials", type=int, default=4, help="plays of a task (default 4)")
    parser.add_argument("--epsilon", type=float, default=0.0, help="probability of a random action (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the random actions (default 0)")
    options = parser.parse_args(argv)
    if options.trials < 1 or not 0 <= options.epsilon <= 1:
        parser.error("--trials must be at least 1, and --epsilon between 0 and 1")
    rows = list(oracle_rows(options.data, options.trials, options.epsilon, options.seed))
    write_rows(options.out, rows)
    won = sum(row["reward"] > 0 for row in rows)
    print(f"{options.out}: {len(rows)} plays of {len({row['task'] for row in rows})} tasks, {won} won")


if __name__ == "__main__":
    main()
