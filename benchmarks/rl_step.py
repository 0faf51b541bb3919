#!/usr/bin/env python
"""Seconds of a whole RL step with prefix sharing on and off, phase by phase, on the same recorded rollouts.

    python benchmarks/rl_step.py run --out outputs/rl_step    # records rollouts, replays them in turn, prints the table
    python benchmarks/rl_step.py table outputs/rl_step        # the table again

A random model (hidden 256, 4 layers) plays TextWorld games of three rooms for six turns, step-wise: sample t holds
all of the history. One job records; then jobs with sharing off (veRL's own path and placement) and on replay it, in
turn, two Megatron workers each. A cell is a median over the steps of all jobs of a side, without each job's first step.
Generation is the same on both sides and is not part of a replay: its row is what the recording took.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rl_jobs import Steps, middle, read_steps, run_job, run_module

PHASES = {
    "rollout": "timing_s/gen",
    "old log-prob": "timing_s/old_log_prob",
    "reference": "timing_s/ref",
    "update": "timing_s/update_actor",
}
ENGINE = {"old log-prob": "psrl/old_log_prob", "reference": "psrl/ref", "update": "psrl/update"}
"""Where the engine's own figures of a phase are: processor time of the slowest rank's passes, ideal speed-up."""
REST = "rest"
SIDES = ("off", "on")


def prepare(out: Path) -> None:
    """Games, prompts and a random model below ``out``, where they are absent."""
    if not (out / "data" / "train.parquet").is_file():
        games = ["--train", "8", "--val", "1", "--family", "medium", "--action-format", "menu"]
        run_module(["psrl.agents.dataset", "textworld", "--out", str(out / "data"), *games], out / "dataset.log")
    if not (out / "model").is_dir():
        size = ["--hidden", "256", "--layers", "4"]
        run_module(["psrl.models.tiny_chat", str(out / "model"), *size], out / "model.log")


def job(num_steps: int) -> list[str]:
    """Overrides of ``configs/cpu_quickstart.yaml``, the same for every job."""
    return [
        "data.train_batch_size=2",
        "data.max_prompt_length=2048",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "+agents.max_turns=6",
        "+agents.invalid_action_penalty=0.1",
        "psrl.poll_seconds=0.1",
        f"trainer.total_training_steps={num_steps}",
    ]


def run(out: Path, num_steps: int, num_rounds: int) -> None:
    prepare(out)
    rollouts = out / "rollouts"
    if not rollouts.is_dir():
        run_job(out, "record", [*job(num_steps), f"psrl.record_rollouts={rollouts}"])
    for number in range(num_rounds):
        for side in SIDES:
            off = ["psrl.enable=false", "psrl.balance=false"] if side == "off" else []
            run_job(out, f"{side}{number}", [*job(num_steps), f"psrl.replay_rollouts={rollouts}", *off])


def seconds(steps: Steps, rollout: float) -> dict[str, float]:
    """Medians of phases and of the whole step. The time to load recorded rollouts is replaced by ``rollout``."""
    found = {phase: median(step[key] for step in steps) for phase, key in PHASES.items() if phase != "rollout"}
    others = [step["timing_s/step"] - step[PHASES["rollout"]] for step in steps]
    found[REST] = median(
        other - sum(step[key] for phase, key in PHASES.items() if phase != "rollout")
        for step, other in zip(steps, others, strict=True)
    )
    return {"rollout": rollout, **found, "whole step": rollout + median(others)}


def table(out: Path) -> str:
    """Markdown."""
    recorded = read_steps(out / "record.jsonl")[1:]
    rollout = middle(recorded, PHASES["rollout"])
    steps: dict[str, Steps] = {
        side: [step for file in sorted(out.glob(f"{side}[0-9]*.jsonl")) for step in read_steps(file)[1:]]
        for side in SIDES
    }
    off, on = (seconds(steps[side], rollout) for side in SIDES)
    lines = [
        "| phase | share of the step, sharing off | speed-up | of processor time | ideal |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for phase in off:
        cells = [phase, f"{off[phase] / off['whole step']:.0%}"]
        cells += ["the same rollouts" if phase == "rollout" else f"{off[phase] / on[phase]:.1f}x", "", ""]
        if phase in ENGINE:
            cpu = [middle(steps[side], f"{ENGINE[phase]}/cpu_seconds") for side in SIDES]
            cells[3:] = [f"{cpu[0] / cpu[1]:.1f}x", f"{middle(steps['on'], f'{ENGINE[phase]}/ideal_speedup'):.1f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    rows, tokens = middle(steps["on"], "psrl/placement/rows"), middle(steps["on"], "psrl/tokens")
    note = (
        f"{rows:.0f} samples and {tokens:,.0f} tokens a step, "
        f"{middle(steps['on'], 'psrl/prefix_match_rate'):.0%} of the update's shared; medians of "
        f"{len(steps['off'])} steps off and {len(steps['on'])} on. Seconds off/on: "
        + ", ".join(f"{phase} {off[phase]:.1f}/{on[phase]:.1f}" for phase in off)
    )
    return "\n".join([*lines, "", note])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Seconds of a whole RL step with prefix sharing on and off.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("run", help="record, replay with both sides in turn, print the table")
    start.add_argument("--out", type=Path, required=True, help="folder for everything that is made")
    start.add_argument(
        "--steps", type=int, default=3, help="steps of a job, of which the first is left out (default 3)"
    )
    start.add_argument("--rounds", type=int, default=2, help="jobs of each side (default 2)")
    show = commands.add_parser("table", help="print the table of what `run` left")
    show.add_argument("out", type=Path, help="folder of `run`")
    options = parser.parse_args(argv)
    if options.command == "run":
        if options.steps < 2 or options.rounds < 1:
            parser.error("--steps must be at least 2 and --rounds at least 1")
        run(options.out.resolve(), options.steps, options.rounds)
    print(table(options.out))


if __name__ == "__main__":
    main()
