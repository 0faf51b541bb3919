"""Lifetimes of KV blocks: reference counts at micro-batch granularity, for the planner and for the cache alike.

A block's K/V lives from the end of its writer's pass 1 until the last micro-batch that reads it is done (where the
policy keeps it, until the last that uses the cache at all). Its gradient accumulators live from the first reader's
backward until the writer's own backward, which consumes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psrl.cost import KVFootprint
from psrl.errors import PlanError
from psrl.types import CachePolicy, KVBlock, MicroBatch, Wave


class Freed(NamedTuple):
    """Blocks whose storage ends with a micro-batch."""

    kv: tuple[int, ...]
    grads: tuple[int, ...]


@dataclass(slots=True)
class BlockLedger:
    """Which blocks are live. Methods mutate the ledger and return what to allocate or free; they touch no tensor."""

    blocks: Sequence[KVBlock]
    micro_batches: Sequence[MicroBatch]
    forward_only: bool
    policy: CachePolicy = CachePolicy()  # noqa: RUF009  immutable
    ref_counts: list[int] = field(init=False)
    live_kv: set[int] = field(init=False, default_factory=set[int])
    live_grads: set[int] = field(init=False, default_factory=set[int])
    executions_left: int = field(init=False)
    """Of micro-batches that use the cache."""

    def __post_init__(self) -> None:
        self.ref_counts = [block.ref_count for block in self.blocks]
        self.executions_left = sum(
            2 if mb.is_spine and not self.forward_only else 1 for mb in self.micro_batches if _uses_cache(mb)
        )

    def copy(self) -> BlockLedger:
        other = BlockLedger(self.blocks, self.micro_batches, self.forward_only, self.policy)
        other.ref_counts, other.executions_left = self.ref_counts.copy(), self.executions_left
        other.live_kv, other.live_grads = self.live_kv.copy(), self.live_grads.copy()
        return other

    def write(self, micro_batch: int, *, backward: bool) -> tuple[int, ...]:
        """A micro-batch stores its blocks, in its only or first forward. Returns those to allocate K/V for."""
        mb = self.micro_batches[micro_batch]
        own = () if backward and mb.is_spine else mb.own_blocks
        self.live_kv.update(own)
        return own

    def begin_backward(self, micro_batch: int) -> tuple[int, ...]:
        """Returns the path blocks that need a gradient accumulator now."""
        new = tuple(b for b in self.micro_batches[micro_batch].path_blocks if b not in self.live_grads)
        self.live_grads.update(new)
        return new

    def end(self, micro_batch: int, *, backward: bool) -> Freed:
        """A micro-batch is done with its path (and, after a backward, with its own accumulators)."""
        mb = self.micro_batches[micro_batch]
        dead: list[int] = []
        for block in mb.path_blocks:
            if self.ref_counts[block] <= 0 or block not in self.live_kv:
                raise PlanError(f"micro-batch {micro_batch} reads KV block {block}, which is not live")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0 and not self.policy.keeps:
                self.live_kv.remove(block)
                dead.append(block)
        self.executions_left -= _uses_cache(mb)
        if self.policy.keeps and not self.executions_left:
            dead += sorted(self.live_kv)
            self.live_kv.clear()
        grads = tuple(b for b in mb.own_blocks if b in self.live_grads) if backward else ()
        self.live_grads.difference_update(grads)
        return Freed(tuple(dead), grads)


def _uses_cache(mb: MicroBatch) -> bool:
    return bool(mb.path_blocks or mb.own_blocks)


def wave_peak(ledger: BlockLedger, wave: Wave, footprint: KVFootprint) -> int:
    """Peak cache bytes while ``wave`` runs. Advances the ledger past the wave."""
    kv, grad = footprint.kv_bytes_per_token, footprint.grad_bytes_per_token
    tokens = [footprint.stored_tokens(ledger.policy.room(block.num_tokens)) for block in ledger.blocks]
    live = sum(tokens[b] * kv for b in ledger.live_kv) + sum(tokens[b] * grad for b in ledger.live_grads)
    peak = live
    for backward, order in ((False, wave.pass1), (True, wave.pass2)):
        for micro_batch in order:
            live += kv * sum(tokens[b] for b in ledger.write(micro_batch, backward=backward))
            if backward:
                live += grad * sum(tokens[b] for b in ledger.begin_backward(micro_batch))
            peak = max(peak, live)
            freed = ledger.end(micro_batch, backward=backward)
            live -= kv * sum(tokens[b] for b in freed.kv) + grad * sum(tokens[b] for b in freed.grads)
    return peak
