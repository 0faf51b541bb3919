"""The KV cache manager: one tensor per block and kind, reference counted by micro-batch, freed at zero.

A block is a span of spine tokens; nothing is padded and no shared prefix is stored twice. Storage goes through a
tier (see ``storage.py``), which counts bytes exactly.

Under context parallelism a rank stores an even shard of every block (see ``psrl/context.py``): ``write`` takes all
tokens and keeps that shard; P and n, and the tokens of own gradients, then count the shards' rows.

Shape legend: L local layers, T tokens of a micro-batch, P path tokens, n tokens of a block, K kv heads of this rank,
H head dim (K and V may differ).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from psrl.blocks import BlockLedger
from psrl.cache.storage import CacheBytes, DeviceTier, accumulator_dtype
from psrl.context import shard_size
from psrl.errors import PlanError
from psrl.types import ExecutionPlan


class KVPair(NamedTuple):
    """K and V, or their gradients: [tokens, K, H]."""

    k: Tensor
    v: Tensor


class PathBlocks(NamedTuple):
    """The blocks of a micro-batch's path where they lie, root first: [L, n, K, H] each."""

    k: list[Tensor]
    v: list[Tensor]
    sizes: list[int]
    """Rows of each block that hold tokens, its first ones."""


class BlockShard(NamedTuple):
    """Which of ``size`` even shards of every block a cache stores."""

    rank: int = 0
    size: int = 1


class KVCache:
    """K/V and gradient accumulators of one plan on one rank.

    Every method that takes a micro-batch and a layer is called once per layer; the bookkeeping of a micro-batch closes
    with its last layer, in whatever order layers come.
    """

    lends_blocks = True
    """Whether ``path_blocks`` and ``path_grads`` are there: blocks are whole tensors on the device. A cache that keeps
    them elsewhere says False, and its path is gathered by ``read``."""

    def __init__(
        self,
        plan: ExecutionPlan,
        num_layers: int,
        tier: DeviceTier | None = None,
        shard: BlockShard = BlockShard(),  # noqa: B008  immutable
    ) -> None:
        self.plan = plan
        self.num_layers = num_layers
        self.tier = tier or DeviceTier()
        self._shard = shard
        self._sizes = [shard_size(block.num_tokens, shard.size) for block in plan.blocks]
        self._rooms = [shard_size(plan.cache.room(block.num_tokens), shard.size) for block in plan.blocks]
        self._ledger = BlockLedger(plan.blocks, plan.micro_batches, plan.forward_only, plan.cache)
        self._kv: dict[int, KVPair] = {}  # [L, n, K, H]
        self._grads: dict[int, KVPair] = {}  # [L, n, K, H]
        self._layers_left: dict[tuple[int, bool], int] = {}

    @property
    def num_live_blocks(self) -> int:
        return len(self._kv) + len(self._grads)

    @property
    def bytes(self) -> CacheBytes:
        """So far."""
        return CacheBytes(device_peak=self.tier.peak_bytes)

    def num_stored(self, blocks: tuple[int, ...]) -> int:
        """Rows that this cache has for the blocks."""
        return sum(self._sizes[block] for block in blocks)

    # ------------------------------------------------------------------------------------------------- forward
    def write(self, micro_batch: int, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Copy the new K/V of a micro-batch into its blocks. Allocates them at the first layer; again, it repeats."""
        own = self.plan.micro_batches[micro_batch].own_blocks
        if not own:
            return
        self._begin_write(micro_batch, layer, k_TKH, v_TKH)
        start = 0
        for block in own:
            stop = start + self.plan.blocks[block].num_tokens
            begin = min(start + self._shard.rank * self._sizes[block], stop)
            num_kept = min(self._sizes[block], stop - begin)
            for stored, new in zip(self._kv_at(block, layer), (k_TKH, v_TKH), strict=True):
                stored[:num_kept].copy_(new[begin : begin + num_kept])
            start = stop

    def read(self, micro_batch: int, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> KVPair:
        """``[path | local]`` K/V, gathered in one copy: [P + T, K, H]. Does not change the cache."""
        path = self.plan.micro_batches[micro_batch].path_blocks
        if not path:
            return KVPair(k_TKH, v_TKH)
        self._open(micro_batch, layer, backward=False)
        stored = [self._kv_at(block, layer) for block in path]
        return KVPair(
            torch.cat([pair.k for pair in stored] + [k_TKH]), torch.cat([pair.v for pair in stored] + [v_TKH])
        )

    def path_blocks(self, micro_batch: int) -> PathBlocks:
        """The path's K and V. They stay where they are until the micro-batch's last ``end_layer``."""
        return self._lend(micro_batch, self._kv)

    # ------------------------------------------------------------------------------------------------ backward
    def path_grads(self, micro_batch: int) -> PathBlocks:
        """The accumulators of the path's K and V (fp32, or fp64 for fp64), for a backward that adds to them itself.

        They come into being with the first reader's backward, as zeros.
        """
        self._begin_backward(micro_batch)
        return self._lend(micro_batch, self._grads)

    def add_grads(self, micro_batch: int, layer: int, dk_PKH: Tensor, dv_PKH: Tensor) -> None:
        """Add the gradients of a micro-batch's path to its blocks' accumulators (fp32, or fp64 for fp64)."""
        self._open(micro_batch, layer, backward=True)
        start = 0
        for block in self.plan.micro_batches[micro_batch].path_blocks:
            stop = start + self._sizes[block]
            for total, new in zip(self._grads_at(block, layer), (dk_PKH, dv_PKH), strict=True):
                total.add_(new[start:stop])
            start = stop

    def own_grads(self, micro_batch: int, layer: int) -> KVPair:
        """What descendants accumulated for the tokens of a spine micro-batch: [T, K, H] in the accumulators' dtype.

        Raises:
            PlanError: a descendant has not run its backward yet.
        """
        self._open(micro_batch, layer, backward=True)
        own = [self._grads_at(block, layer) for block in self.plan.micro_batches[micro_batch].own_blocks]
        return KVPair(torch.cat([pair.k for pair in own]), torch.cat([pair.v for pair in own]))

    def end_layer(self, micro_batch: int, *, backward: bool) -> bool:
        """One layer of the micro-batch is done. With the last one, blocks nobody needs any more are freed.

        Returns whether it was the last.
        """
        key = (micro_batch, backward)
        left = self._layers_left.get(key, self.num_layers) - 1
        if left:
            self._layers_left[key] = left
            return False
        self._layers_left.pop(key, None)
        freed = self._ledger.end(micro_batch, backward=backward)
        for block in freed.kv:
            self.tier.free(*self._kv.pop(block))
        for block in freed.grads:
            self.tier.free(*self._grads.pop(block))
        return True

    def check_drained(self) -> None:
        """Every block has been freed.

        Raises:
            PlanError: blocks are left after the last micro-batch.
        """
        if self.num_live_blocks or self._layers_left:
            raise PlanError(
                f"{len(self._kv)} KV blocks and {len(self._grads)} accumulators are left after the last micro-batch "
                f"(unfinished: {sorted(self._layers_left)})"
            )

    def close(self) -> None:
        """Drop everything, wherever the plan stopped. Can be called again."""
        self.tier.clear()
        for held in (self._kv, self._grads, self._layers_left):
            held.clear()

    # ------------------------------------------------------------------------------------------------- storage
    def _begin_write(self, micro_batch: int, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Have storage for a layer of the micro-batch's own blocks."""
        if self.plan.micro_batches[micro_batch].own_blocks[0] in self._kv:
            return
        for block in self._ledger.write(micro_batch, backward=False):
            shape = (self.num_layers, self._rooms[block])
            self._kv[block] = KVPair(*(self.tier.empty(shape + x.shape[1:], x.dtype, x.device)
                                       for x in (k_TKH, v_TKH)))  # fmt: skip

    def _open(self, micro_batch: int, layer: int, *, backward: bool) -> None:
        """Have what a layer of an execution needs: the path's K/V, or all of its accumulators."""
        if not backward:
            return
        mb = self.plan.micro_batches[micro_batch]
        missing = [block for block in mb.own_blocks if block not in self._grads] if mb.is_spine else []
        if missing:
            raise PlanError(f"backward of micro-batch {micro_batch} before any reader of its KV blocks {missing}")
        self._begin_backward(micro_batch)

    def _kv_at(self, block: int, layer: int) -> KVPair:
        """Views of what is stored of a block: [n, K, H]."""
        return self._view(self._kv, block, layer)

    def _grads_at(self, block: int, layer: int) -> KVPair:
        return self._view(self._grads, block, layer)

    def _view(self, stored: dict[int, KVPair], block: int, layer: int) -> KVPair:
        return KVPair(*(x[layer, : self._sizes[block]] for x in stored[block]))

    def _begin_backward(self, micro_batch: int) -> None:
        """Allocate what accumulators the path lacks, at the first layer."""
        if self._layers_left.get((micro_batch, True), self.num_layers) == self.num_layers:
            for block in self._ledger.begin_backward(micro_batch):
                self._grads[block] = KVPair(*(self._zeros_like(x) for x in self._kv[block]))

    def _lend(self, micro_batch: int, stored: dict[int, KVPair]) -> PathBlocks:
        path = self.plan.micro_batches[micro_batch].path_blocks
        pairs = [stored[block] for block in path]
        return PathBlocks([x.k for x in pairs], [x.v for x in pairs], [self._sizes[block] for block in path])

    def _zeros_like(self, x: Tensor) -> Tensor:
        return self.tier.empty(x.shape, accumulator_dtype(x.dtype), x.device).zero_()
