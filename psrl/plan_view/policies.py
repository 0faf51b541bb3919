"""What other cache policies would hold on the same plan: a simulation of bytes, for comparison.

psrl frees a block with its last reader and stores no token twice, because the plan knows every read. A serving engine's
prefix cache knows neither reader nor end: it stores what it computes and keeps it.

- ``paged`` (vLLM's prefix caching): pages of 16 tokens of one sample, found again by the hash of all tokens up to the
  page's end. A page is shared only if it is full and all of it is equal; the last, partial page of a sample is its own,
  and a page takes its full size. Nothing is freed before the end.
- ``radix`` (SGLang): a radix tree of single tokens, evicted least recently used first when a capacity is given. What
  was evicted and is read again is computed again. Without a capacity nothing is freed before the end.

Both are followed through the plan's own executions, and get gradient accumulators as psrl's cache does: where another
micro-batch reads a token, from that backward on. They are freed with the token's own backward, as the plan frees them;
only K/V is kept.

Shape legend: U unique tokens in preorder, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from psrl.cost import KVFootprint
from psrl.errors import ConfigError, PlanError
from psrl.plan_view.timeline import Timeline
from psrl.tree import PrefixTree
from psrl.types import ExecutionPlan, IntArray, SampleBatch

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PolicyBytes:
    """K/V and gradient accumulators over a plan's executions."""

    name: str
    kv_bytes: IntArray
    """[executions] while each runs."""
    grad_bytes: IntArray
    recomputed_tokens: int = 0
    """Tokens that had been evicted and were read again."""

    @property
    def kv_peak(self) -> int:
        return int(self.kv_bytes.max(initial=0))

    @property
    def peak(self) -> int:
        """K/V and accumulators together."""
        return int((self.kv_bytes + self.grad_bytes).max(initial=0))


def adaptive(timeline: Timeline) -> PolicyBytes:
    """psrl's own: blocks between places where readers differ, freed with their last reader."""
    kv = np.asarray([e.kv_bytes for e in timeline.executions], dtype=np.int64)
    return PolicyBytes("psrl", kv, _grad_bytes(timeline))


def paged(
    plan: ExecutionPlan,
    timeline: Timeline,
    batch: SampleBatch,
    tree: PrefixTree,
    footprint: KVFootprint,
    page_tokens: int = PAGE_TOKENS,
) -> PolicyBytes:
    """Pages that are kept to the end.

    A page exists from the first execution that computes one of its tokens.

    Raises:
        ConfigError: ``page_tokens`` below 1.
    """
    if page_tokens < 1:
        raise ConfigError(f"page_tokens must be at least 1, got {page_tokens}")
    first_U = _first_execution(plan, timeline)
    born: list[int] = []
    full: set[int] = set()
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        path = tree.index_N[start:end]
        for begin in range(0, len(path), page_tokens):
            page = path[begin : begin + page_tokens]
            last = int(page[-1])  # a token of the tree stands for its whole prefix, as the hash does
            if len(page) == page_tokens:
                if last in full:
                    continue
                full.add(last)
            born.append(int(first_U[page].min()))
    pages = np.bincount(np.asarray(born, dtype=np.int64), minlength=len(timeline.executions)).cumsum()
    return PolicyBytes("paged", pages * page_tokens * footprint.kv_bytes_per_token, _grad_bytes(timeline))


def radix(
    plan: ExecutionPlan, timeline: Timeline, footprint: KVFootprint, capacity_bytes: int | None = None
) -> PolicyBytes:
    """Every computed token is kept, least recently used ones are evicted where there is a capacity.

    A token is used when a micro-batch computes or reads it, and what a micro-batch computes or reads stays while it
    runs. Tokens go in groups that are always used together: psrl's blocks, and the tokens of a leaf micro-batch.

    Raises:
        ConfigError: the capacity cannot hold one micro-batch and what it reads.
    """
    per_token = footprint.kv_bytes_per_token
    capacity = None if capacity_bytes is None else capacity_bytes // per_token
    sizes: dict[int, int] = {block.block_id: block.num_tokens for block in plan.blocks}
    held: OrderedDict[int, int] = OrderedDict()  # least recently used first: group to tokens
    live, recomputed = 0, 0
    written: set[int] = set()
    kv: list[int] = []
    for e in timeline.executions:
        mb = plan.micro_batches[e.micro_batch]
        # A leaf's tokens are a group of their own, numbered after the blocks.
        own = mb.own_blocks or (len(plan.blocks) + mb.index,)
        if not mb.own_blocks:
            sizes[own[0]] = mb.num_tokens
        wanted = (*e.reads, *own)
        if not set(e.reads) <= written:
            raise PlanError(f"micro-batch {mb.index} reads a block that was never computed")
        recomputed += sum(sizes[group] for group in e.reads if group not in held)
        for group in wanted:
            live += sizes[group] if group not in held else 0
            held[group] = sizes[group]
            held.move_to_end(group)
        written.update(own)
        while capacity is not None and live > capacity:
            victim = next(iter(held))
            if victim in wanted:
                raise ConfigError(
                    f"micro-batch {mb.index} and what it reads need {live * per_token:,} bytes, the capacity is "
                    f"{capacity_bytes:,}"
                )
            live -= held.pop(victim)
        kv.append(live * per_token)
    return PolicyBytes("radix", np.asarray(kv, dtype=np.int64), _grad_bytes(timeline), recomputed)


def _grad_bytes(timeline: Timeline) -> IntArray:
    return np.asarray([e.grad_bytes for e in timeline.executions], dtype=np.int64)


def _first_execution(plan: ExecutionPlan, timeline: Timeline) -> IntArray:
    """[U] the first execution that computes each token."""
    first_U = np.full(len(plan.token_ids_U), len(timeline.executions), dtype=np.int64)
    for number, e in enumerate(timeline.executions):
        tokens_T = plan.micro_batches[e.micro_batch].tokens_T
        first_U[tokens_T] = np.minimum(first_U[tokens_T], number)
    return first_U
