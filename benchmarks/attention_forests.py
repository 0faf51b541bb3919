"""What ``benchmarks/attention.py`` runs: forests as interval masks, and the shape of a layer's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from psrl.runtime.attention.cached_layer import LayerShape
from psrl.types import IntArray


class Workload(NamedTuple):
    """A forest with what it stands for."""

    name: str
    first_S: IntArray
    last_S: IntArray
    num_tokens: int
    sample_lens: IntArray
    """Tokens of each sample, shared ones included."""
    num_blocks: int = 0
    """Of the cached path: the keys that are no tokens."""

    @property
    def path_len(self) -> int:
        return len(self.first_S) - self.num_tokens


def grpo(scale: float) -> Workload:
    """One prompt, eight responses."""
    prompt, response, count = int(4096 * scale), int(2048 * scale), 8
    ends = prompt + response * np.arange(1, count + 1)
    last = np.r_[np.full(prompt, ends[-1]), np.repeat(ends, response)]
    return Workload("grpo", np.arange(len(last)), last, len(last), np.full(count, prompt + response))


def responses(scale: float) -> Workload:
    """``grpo`` where the prompt is cached."""
    work = grpo(scale)
    prompt = int(4096 * scale)
    first, last = (x - prompt for x in (work.first_S, work.last_S))
    return Workload("responses", first.clip(0), last, work.num_tokens - prompt, work.sample_lens, num_blocks=4)


def steps(scale: float) -> Workload:
    """A trajectory whose steps think aloud: a trunk that grows, and a branch beside each of its segments."""
    segment, thought, count = int(512 * scale), int(256 * scale), 16
    total = count * (segment + thought)
    last = []
    for step in range(count):
        last += [np.full(segment, total), np.full(thought, (step + 1) * (segment + thought))]
    lens = segment * np.arange(1, count + 1) + thought
    return Workload("steps", np.arange(total), np.concatenate(last), total, lens)


def tree(scale: float) -> Workload:
    """A binary tree of turns, seven deep."""
    turn, depth = int(128 * scale), 7
    last: list[IntArray] = []

    def grow(start: int, level: int) -> int:
        place = len(last)
        last.append(np.empty(0, np.int64))
        end = start + turn
        for _ in range(2 if level < depth else 0):
            end = grow(end, level + 1)
        last[place] = np.full(turn, end)
        return end

    total = grow(0, 1)
    return Workload("tree", np.arange(total), np.concatenate(last), total, np.full(2 ** (depth - 1), turn * depth))


def long_path(scale: float) -> Workload:
    """Four short branches that hang off a long cached path."""
    path, branch, count = int(32768 * scale), int(64 * scale) + 1, 4
    total = branch * count
    first = np.r_[np.zeros(path, np.int64), np.arange(total)]
    last = np.r_[np.full(path, total), np.repeat(branch * np.arange(1, count + 1), branch)]
    return Workload("long_path", first, last, total, np.full(count, path + branch), num_blocks=16)


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "grpo": grpo, "responses": responses, "steps": steps, "tree": tree, "long_path": long_path
}  # fmt: skip


class Shape(LayerShape):
    """With what its attention costs."""

    def forward_flops(self, pairs: int) -> float:
        """Two products of a pair, a multiplication and an addition each."""
        return 2.0 * pairs * self.num_heads * (self.head_dim + self.v_head_dim)

    def least_bytes(self, num_queries: int, num_keys: int) -> int:
        """Every input read once and the output written once."""
        of_queries = num_queries * self.num_heads * (self.head_dim + self.v_head_dim)
        of_keys = num_keys * self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return (of_queries + of_keys) * torch.finfo(self.dtype).bits // 8
