#!/usr/bin/env python
"""A small job that learns, with prefix sharing and without: the same seeds, the reward of every step side by side.

    python benchmarks/learning_curves.py run --out outputs/learning            # data, warm start, both jobs, tables
    python benchmarks/learning_curves.py plot outputs/learning --image docs/img/learning.svg

A tiny model is warmed up with ``psrl sft`` on plays of easy TextWorld games in which most actions are random, so that
it answers in the right form and wins now and then. Then step-wise GRPO trains it on these games with the real job. Both
jobs sample their own rollouts, from the same random numbers: with ``--dtype float64`` they are the same rollouts to the
end (docs/learning.md). ``plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl_jobs import Steps, read_steps, run_job, run_module

SIDES = {"on": "sharing on", "off": "sharing off"}
REWARD = "psrl/trajectory_reward"
NUM_GAMES = 8
SMOOTHED = 5
"""Steps of the moving mean that is drawn."""


def prepare(out: Path, seed: int) -> Path:
    """Games, prompts and the warmed-up model below ``out``, where they are absent; returns the model's folder."""
    train, traces, model = out / "data" / "train.parquet", out / "warm_up.jsonl.gz", out / "warm_model"
    if not train.is_file():
        games = ["--train", str(NUM_GAMES), "--val", "2", "--family", "easy", "--seed", str(seed)]
        run_module(["psrl.agents.dataset", "textworld", "--out", str(train.parent), *games], out / "dataset.log")
    if not traces.is_file():
        plays = ["--trials", "16", "--epsilon", "0.6", "--seed", str(seed)]
        run_module(["psrl.agents.oracle_traces", str(train), "--out", str(traces), *plays], out / "traces.log")
    if not model.is_dir():
        run_module(["psrl.models.tiny_chat", str(out / "random_model")], out / "model.log")
        options = ["--model", str(out / "random_model"), "--out", str(model), "--seed", str(seed)]
        options += ["--epochs", "16", "--batch", "48", "--lr", "3e-3"]
        run_module(["psrl.cli.main", "sft", str(traces), *options], out / "warm_up.log")
    return model


def job(model: Path, num_steps: int, side: str, dtype: str) -> list[str]:
    """Overrides of ``configs/cpu_quickstart.yaml``."""
    return [
        *(
            f"actor_rollout_ref.{part}={dtype}"
            for part in ("actor.megatron.dtype", "ref.megatron.dtype", "rollout.dtype")
        ),
        f"actor_rollout_ref.model.path={model}",
        f"psrl.enable={'true' if side == 'on' else 'false'}",
        "psrl.poll_seconds=0.1",
        f"data.train_batch_size={NUM_GAMES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_GAMES}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        f"trainer.total_training_steps={num_steps}",
    ]


def block_means(rewards: Sequence[float], size: int) -> list[float]:
    return [sum(rewards[start : start + size]) / size for start in range(0, len(rewards) - size + 1, size)]


def table(curves: dict[str, Steps], size: int) -> str:
    """Markdown: mean reward of every ``size`` steps, a row a side."""
    means = {side: block_means([step[REWARD] for step in steps], size) for side, steps in curves.items()}
    num_blocks = min(map(len, means.values()))
    lines = ["| steps | " + " | ".join(SIDES[side] for side in means) + " |", "| --- |" + " ---: |" * len(means)]
    for block in range(num_blocks):
        cells = " | ".join(f"{values[block]:.3f}" for values in means.values())
        lines.append(f"| {block * size + 1}-{(block + 1) * size} | {cells} |")
    return "\n".join(lines)


def plot(curves: dict[str, Steps], image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "psrl"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    # Dashes, so that curves that coincide are both seen.
    for (side, steps), color, style in zip(curves.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=False):
        rewards = [step[REWARD] for step in steps]
        numbers = range(1, len(rewards) + 1)
        smooth = [sum(rewards[i - SMOOTHED : i]) / SMOOTHED for i in range(SMOOTHED, len(rewards) + 1)]
        left.plot(numbers, rewards, color=color, alpha=0.25, linewidth=0.8)
        left.plot(range(SMOOTHED, len(rewards) + 1), smooth, style, color=color, label=SIDES[side])
        right.plot(numbers, [step["actor/entropy"] for step in steps], style, color=color, label=SIDES[side])
    left.set(xlabel="step", ylabel="games won", ylim=(0, 1.02), title=f"reward, and its mean over {SMOOTHED} steps")
    right.set(xlabel="step", ylabel="nats per token", ylim=(0, None), title="entropy of the policy")
    left.legend(loc="lower right")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A small job that learns, with prefix sharing and without.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="prepare what is absent, run both jobs, print the table")
    run.add_argument("--out", type=Path, required=True, help="folder for everything that is made")
    run.add_argument("--steps", type=int, default=100, help="training steps of a job (default 100)")
    run.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of training and rollouts")
    run.add_argument("--sides", choices=list(SIDES), nargs="+", default=list(SIDES), help="jobs to run (default both)")
    run.add_argument("--seed", type=int, default=0, help="of games, plays and warm-up (default 0)")
    show = commands.add_parser("plot", help="print the table and draw the curves of what `run` left")
    show.add_argument("out", type=Path, help="folder of `run`")
    show.add_argument("--image", type=Path, required=True, help="file to write, .svg or .png")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    if options.command == "run":
        model = prepare(out, options.seed)
        for side in options.sides:
            run_job(out, side, job(model, options.steps, side, options.dtype))
    curves = {side: read_steps(out / f"{side}.jsonl") for side in SIDES if (out / f"{side}.jsonl").is_file()}
    print(table(curves, size=10))
    if options.command == "plot":
        plot(curves, options.image)


if __name__ == "__main__":
    main()
