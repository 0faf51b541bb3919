"""A micro-batch under context parallelism: this rank's part of it, and the collectives that join the parts.

All ranks of the group evaluate the same loss. A gradient reaches each of them once and stays on the rank that computes
the token, so that the sum over ranks is the loss's gradient, not a multiple of it.

Shape legend: C ranks, T tokens of the micro-batch, padding included, t = T / C those of this rank, P path tokens,
s path tokens that this rank stores, E edges of the micro-batch, e those of this rank's rows, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.context import Tap, deal_tokens, key_sources, own_tap, query_pairs
from psrl.runtime.attention import AttentionLayout
from psrl.types import ExecutionPlan, FloatArray, IntArray, MicroBatch


class ContextRank(NamedTuple):
    """This rank among those that share its micro-batches."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class ContextPart:
    """This rank's part of one micro-batch."""

    where: ContextRank
    sources_S: Tensor
    """[P + T] row of each key in the gathered ``[path shards | tokens]`` of all ranks."""
    tap_rows: Tensor
    """Rows of this rank's shards of the micro-batch's own blocks that hold a token."""
    tap_keys: Tensor
    """[P + T] indices of those tokens."""
    edges_e: Tensor
    """This rank's edges, as indices into the micro-batch's."""
    num_edges: int

    def gather(self, x_rKH: Tensor) -> Tensor:
        """[P + T, K, H] keys or values from every rank's [s + t, K, H]. Collective."""
        rows = x_rKH.new_empty((self.where.size * len(x_rKH), *x_rKH.shape[1:]))
        dist.all_gather_into_tensor(rows, x_rKH.contiguous(), group=self.where.group)
        return rows.index_select(0, self.sources_S)

    def scatter_sum(self, dx_SKH: Tensor, num_rows: int) -> Tensor:
        """[s + t, K, H] sum over ranks of the gradients of this rank's rows. Collective.

        Args:
            num_rows: s + t.
        """
        rows = dx_SKH.new_zeros((self.where.size * num_rows, *dx_SKH.shape[1:]))
        rows.index_copy_(0, self.sources_S, dx_SKH)
        own = dx_SKH.new_empty((num_rows, *dx_SKH.shape[1:]))
        dist.reduce_scatter_tensor(own, rows, group=self.where.group)
        return own

    def join_edges(self, values_e: Tensor) -> Tensor:
        """[E] outputs of all edges of the micro-batch, on every rank. Differentiable, see above. Collective."""
        return _JoinEdges.apply(values_e, self)


class _JoinEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_e: Tensor, part: ContextPart) -> Tensor:
        ctx.part = part
        values_E = values_e.new_zeros(part.num_edges)
        values_E[part.edges_e] = values_e
        if part.num_edges:
            dist.all_reduce(values_E, group=part.where.group)
        return values_E

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0][ctx.part.edges_e], None


class LocalPart(NamedTuple):
    """What a rank computes of a micro-batch. NumPy; indices are into this rank's tokens and rows."""

    tokens_t: IntArray
    """Ascending, as indices into the micro-batch with its padding."""
    layout: AttentionLayout
    """Of this rank's queries and all keys."""
    rows_R: IntArray
    row_temperature_R: FloatArray
    edges_e: IntArray
    """Indices into the micro-batch's ``edges_E``."""
    edge_rows_e: IntArray
    sources_S: IntArray
    tap: Tap


def whole_part(mb: MicroBatch, num_tokens: int) -> LocalPart:
    """Of a rank that computes the micro-batch alone.

    Args:
        num_tokens: T, padding included.
    """
    none = np.empty(0, dtype=np.int64)
    return LocalPart(
        np.arange(num_tokens),
        AttentionLayout.build(*_padded_mask(mb, num_tokens), num_tokens),
        mb.rows_R,
        mb.row_temperature_R,
        np.arange(len(mb.edges_E)),
        mb.edge_rows_E,
        none,
        Tap(none, none),
    )


def local_part(plan: ExecutionPlan, mb: MicroBatch, num_tokens: int, where: ContextRank) -> LocalPart:
    """Of one rank of a context-parallel group.

    Args:
        num_tokens: T, padding included, a multiple of the number of ranks.
    """
    first_S, last_S = _padded_mask(mb, num_tokens)
    tokens_Ct = deal_tokens(query_pairs(first_S, last_S, num_tokens), where.size)
    tokens_t = tokens_Ct[where.rank]
    rows_R = np.flatnonzero(np.isin(mb.rows_R, tokens_t))
    edges_e = np.flatnonzero(np.isin(mb.edge_rows_E, rows_R))
    return LocalPart(
        tokens_t,
        # An interval of the micro-batch's queries is an interval of an ascending selection of them.
        AttentionLayout.build(np.searchsorted(tokens_t, first_S), np.searchsorted(tokens_t, last_S), len(tokens_t)),
        np.searchsorted(tokens_t, mb.rows_R[rows_R]),
        mb.row_temperature_R[rows_R],
        edges_e,
        np.searchsorted(rows_R, mb.edge_rows_E[edges_e]),
        key_sources(tokens_Ct, [plan.blocks[block].num_tokens for block in mb.path_blocks]),
        own_tap([plan.blocks[block].num_tokens for block in mb.own_blocks], where.rank, where.size),
    )


def _padded_mask(mb: MicroBatch, num_tokens: int) -> tuple[IntArray, IntArray]:
    """Padding sees itself, and nothing else sees it."""
    padding = np.arange(mb.num_tokens, num_tokens)
    return np.concatenate([mb.first_S, padding]), np.concatenate([mb.last_S, padding + 1])
