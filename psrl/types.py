"""Records that travel through psrl: samples in, plan in the middle. NumPy only, frozen, no device.

Shape legend: N tokens of all samples, S samples, U unique tokens (nodes of the tree, in preorder), E edges,
M targets, T local tokens of a micro-batch, P cached path tokens, R logit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from psrl.tiers import TierSchedule

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The samples of one rank's mini-batch, concatenated.

    A target is a token whose log-prob (or value) is wanted; it is predicted from the token before it, so the first
    token of a sample is never one.
    """

    token_ids_N: IntArray
    position_ids_N: IntArray
    cu_seqlens: IntArray
    """[S + 1] offsets of the samples in the token arrays."""
    target_mask_N: BoolArray
    group_ids_S: IntArray
    """SemanticGroup of each sample (veRL ``uid`` or session), any integers."""
    temperatures_S: FloatArray
    """Logits are divided by it. Two samples share hidden states, but not logits, if it differs."""
    extra_inputs_NK: IntArray | None = None
    """Any other per-token model input that decides the hidden state (replayed expert routes, feature ids)."""

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def seqlens_S(self) -> IntArray:
        return np.diff(self.cu_seqlens)

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        loss_mask: Sequence[Sequence[int]],
        position_ids: Sequence[Sequence[int]] | None = None,
        group_ids: Sequence[int] | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> SampleBatch:
        """Concatenate Python lists. Default positions count from 0; default group is one for all; temperature 1."""
        seqlens = [len(ids) for ids in token_ids]
        if position_ids is None:
            position_ids = [range(n) for n in seqlens]

        def flat(rows: Sequence[Sequence[int]], dtype: type[_Scalar]) -> NDArray[_Scalar]:
            return np.fromiter((x for row in rows for x in row), dtype=dtype, count=sum(seqlens))

        return cls(
            token_ids_N=flat(token_ids, np.int64),
            position_ids_N=flat(position_ids, np.int64),
            cu_seqlens=np.concatenate([[0], np.cumsum(seqlens, dtype=np.int64)]).astype(np.int64),
            target_mask_N=flat(loss_mask, np.bool_),
            group_ids_S=np.asarray(group_ids if group_ids is not None else [0] * len(seqlens), dtype=np.int64),
            temperatures_S=np.asarray(
                temperatures if temperatures is not None else [1.0] * len(seqlens), dtype=np.float64
            ),
        )


class Span(NamedTuple):
    """Half-open run of unique tokens [start, end) in preorder."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Edges:
    """Every (source token, label) pair that a sample wants, once. The source token's logit row serves all its edges."""

    source_E: IntArray
    """Unique token whose hidden state predicts the label."""
    label_E: IntArray
    """Token id that is predicted."""
    temperature_E: FloatArray
    target_edges_M: IntArray
    """Edge of every target, targets in sample order."""
    target_positions_M: IntArray
    """Position of the target's source token in the concatenated samples (0 .. N - 1)."""
    cu_targets: IntArray
    """[S + 1] offsets of the samples in the target arrays."""

    @property
    def num_edges(self) -> int:
        return len(self.source_E)


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What the KV cache holds, and for how long. psrl's own is the default; others are for comparison."""

    page_tokens: int = 1
    """Blocks lie within pages of so many tokens of a sample, and each takes whole pages."""
    keeps: bool = False
    """K/V stays until the last micro-batch that uses the cache, not only until its last reader."""
    stores_leaves: bool = False
    """Leaf micro-batches write their K/V too, which nobody reads."""

    def room(self, num_tokens: int) -> int:
        """Tokens that a block of ``num_tokens`` takes."""
        return -(-num_tokens // self.page_tokens) * self.page_tokens


class KVBlock(NamedTuple):
    """K/V of one span, for every layer of a pipeline stage: a run of spine tokens that the same micro-batches read."""

    block_id: int
    span: Span
    writer: int
    """Micro-batch that computes it."""
    ref_count: int
    """Micro-batch executions (over both passes) that read it."""

    @property
    def num_tokens(self) -> int:
        return self.span.end - self.span.start


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Spans computed in one model forward, and the cached path they read.

    Keys of its attention are ``[path | local tokens]``; key s is visible to the local queries
    ``first[s] <= q < last[s]`` (DESIGN: two integers per key).
    """

    index: int
    is_spine: bool
    tokens_T: IntArray
    """Unique tokens computed here, in attention order."""
    first_S: IntArray
    """[P + T] first local query that sees the key."""
    last_S: IntArray
    """[P + T] one past the last local query that sees the key."""
    path_blocks: tuple[int, ...]
    """KVBlocks read, root first; their tokens are the P path keys."""
    own_blocks: tuple[int, ...]
    """KVBlocks written in pass 1 (spine only, unless the cache stores leaves); together ``tokens_T`` in order."""
    rows_R: IntArray
    """Local tokens that own a logit row (ascending by (token, temperature))."""
    row_temperature_R: FloatArray
    edges_E: IntArray
    """Global edge ids computed here."""
    edge_rows_E: IntArray
    """Row of each edge, an index into ``rows_R``; ascending."""
    completes: IntArray
    """Samples whose loss is computed here in pass 2: this is their first micro-batch in pass-2 order."""
    cost: float
    """Forward cost by the injected cost function, its unit."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def path_len(self) -> int:
        return len(self.first_S) - len(self.tokens_T)

    @property
    def visible_pairs(self) -> int:
        """(Query, key) pairs of its attention."""
        return int((self.last_S - self.first_S).sum())


class Wave(NamedTuple):
    """Micro-batches run by one pair of schedules: pass 1 forward only, then pass 2."""

    pass1: tuple[int, ...]
    pass2: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What a plan will do, known before any tensor moves."""

    num_samples: int
    num_tokens: int
    unique_tokens: int
    spine_tokens: int
    num_micro_batches: int
    num_waves: int
    kv_bytes_peak: int
    """Predicted peak of K/V and gradient accumulators on this rank's device, bytes."""
    flops_unshared: float
    flops_shared: float
    kv_host_bytes_peak: int = 0
    """Size of the host pool that the plan needs, bytes."""
    kv_bytes_to_host: int = 0
    """Bytes copied from the device to the host."""
    kv_bytes_to_device: int = 0
    recomputed_tokens: int = 0
    """Of ``unique_tokens``, those that are there again because the budget cannot hold the K/V of their first copy."""
    attention_bytes: int = 0
    """Outputs and log-sum-exps of attention that pass 1 keeps for pass 2 (``ExecutionPlan.kept_attention``), beside
    ``kv_bytes_peak``: their peak on this rank. What is not kept, pass 2 computes again."""

    @property
    def kv_bytes_moved(self) -> int:
        return self.kv_bytes_to_host + self.kv_bytes_to_device

    @property
    def prefix_match_rate(self) -> float:
        """Share of the tokens that another sample's prefix already holds: 1 - unique / all."""
        return 1.0 - self.unique_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def ideal_speedup(self) -> float:
        return self.flops_unshared / self.flops_shared if self.flops_shared else 1.0


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """All decisions for one mini-batch on one rank. Data only; the runtime interprets it."""

    forward_only: bool
    max_tokens: int
    token_ids_U: IntArray
    position_ids_U: IntArray
    index_N: IntArray
    """Unique token of every token of the samples."""
    edges: Edges
    micro_batches: tuple[MicroBatch, ...]
    blocks: tuple[KVBlock, ...]
    waves: tuple[Wave, ...]
    stats: PlanStats
    cache: CachePolicy = CachePolicy()
    tiers: TierSchedule | None = None
    """Transfers between device and host; None where the device holds the whole cache."""
    kept_attention: frozenset[int] = frozenset()
    """Spine micro-batches whose outputs and log-sum-exps of attention pass 1 keeps for pass 2."""
