"""From logit rows to per-edge outputs: log-probs, and the entropy of the row that an edge belongs to.

Shape legend: R logit rows, r rows of a chunk, V vocabulary entries on this rank, E edges of a micro-batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from psrl.types import IntArray


class VocabShard(NamedTuple):
    """The slice of the vocabulary that this tensor-parallel rank holds."""

    start: int
    group: dist.ProcessGroup | None
    """None when one rank holds the whole vocabulary."""


def edge_log_probs(
    logits_RV: Tensor,
    temperature_R: Tensor | None,
    edge_rows_E: Tensor,
    edge_labels_E: Tensor,
    *,
    shard: VocabShard,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every edge's label under its row, and that row's entropy. Differentiable in the logits.

    One softmax serves all edges of a row and both outputs. Computed in float32, or float64 for float64 logits.

    Args:
        temperature_R: divides the logits; None: 1 everywhere.

    Returns:
        log-probs [E] and entropies [E] (None unless ``with_entropy``).
    """
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    scaled_RV = logits_RV.to(dtype)
    if temperature_R is not None:
        # Upstream treats a non-positive temperature (padding) as 1e-8.
        scaled_RV = scaled_RV / temperature_R.to(dtype).clamp_min(1e-8).unsqueeze(-1)
    log_probs_E, entropy_R = _EdgeLogProbs.apply(scaled_RV, edge_rows_E, edge_labels_E, shard, with_entropy)
    return log_probs_E, entropy_R[edge_rows_E] if with_entropy else None


class RowChunk(NamedTuple):
    """Some consecutive logit rows and the edges that belong to them."""

    rows: slice
    edges: slice


def row_chunks(edge_rows_E: IntArray, num_rows: int, max_rows: int) -> tuple[RowChunk, ...]:
    """All rows in chunks of ``max_rows``; the last may have fewer.

    Args:
        edge_rows_E: each edge's row, ascending.
    """
    starts = np.arange(0, num_rows, max_rows)
    stops = np.minimum(starts + max_rows, num_rows)
    firsts, lasts = np.searchsorted(edge_rows_E, starts), np.searchsorted(edge_rows_E, stops)
    return tuple(
        RowChunk(slice(start, stop), slice(first, last))
        for start, stop, first, last in zip(
            starts.tolist(), stops.tolist(), firsts.tolist(), lasts.tolist(), strict=True
        )
    )


def chunked_edge_log_probs(
    hidden_RD: Tensor,
    project: Callable[[Tensor], Tensor],
    temperature_R: Tensor | None,
    edge_rows_E: Tensor,
    edge_labels_E: Tensor,
    chunks: Sequence[RowChunk],
    *,
    shard: VocabShard,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """``edge_log_probs`` of ``project(hidden_RD)`` with the logits of one chunk of rows in memory at a time.

    The backward computes a chunk's logits once more; its gradients are those of ``edge_log_probs``.

    Args:
        project: the output layer: rows [r, D] to logits [r, columns of this rank]. Differentiable.
        chunks: all rows, in order.
    """

    def outputs(hidden_rD: Tensor, chunk: RowChunk) -> tuple[Tensor, Tensor | None]:
        return edge_log_probs(
            project(hidden_rD),
            None if temperature_R is None else temperature_R[chunk.rows],
            edge_rows_E[chunk.edges] - chunk.rows.start,
            edge_labels_E[chunk.edges],
            shard=shard,
            with_entropy=with_entropy,
        )

    parts = [
        checkpoint(outputs, hidden_RD[chunk.rows], chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    log_probs = torch.cat([log_probs for log_probs, _ in parts])
    return log_probs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None


class _EdgeLogProbs(torch.autograd.Function):
    """Keeps normalised probabilities for the backward. ``exp(log_softmax)`` would not do: rounding a log-prob of -20 to
    float32 moves the whole row's sum away from 1, an error that the output layer multiplies by the mean of its rows.
    """

    @staticmethod
    def forward(
        ctx: Any, z_RV: Tensor, rows_E: Tensor, labels_E: Tensor, shard: VocabShard, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        top_R = z_RV.max(-1).values
        if shard.group is not None:
            dist.all_reduce(top_R, op=dist.ReduceOp.MAX, group=shard.group)
        shifted_RV = z_RV - top_R.unsqueeze(-1)
        local_E, inside_E = _local_labels(labels_E, shard, z_RV.shape[-1])
        log_probs_E = torch.where(inside_E, shifted_RV[rows_E, local_E], 0.0)
        p_RV = shifted_RV.exp_()
        total_R = p_RV.sum(-1)
        if shard.group is not None:
            dist.all_reduce(total_R, group=shard.group)
            dist.all_reduce(log_probs_E, group=shard.group)
        log_probs_E = log_probs_E - total_R.log()[rows_E]
        p_RV /= total_R.unsqueeze(-1)
        entropy_R = torch.zeros_like(total_R)
        if with_entropy:
            entropy_R = -torch.special.xlogy(p_RV, p_RV).sum(-1)
            if shard.group is not None:
                dist.all_reduce(entropy_R, group=shard.group)
        ctx.save_for_backward(p_RV, rows_E, labels_E, entropy_R)
        ctx.shard, ctx.with_entropy = shard, with_entropy
        return log_probs_E, entropy_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        d_log_probs_E, d_entropy_R = grad_outputs
        p_RV, rows_E, labels_E, entropy_R = ctx.saved_tensors
        weight_R = torch.zeros_like(entropy_R).index_put_((rows_E,), d_log_probs_E, accumulate=True)
        if ctx.with_entropy:
            # d entropy / d z_j = -p_j (log p_j + entropy)
            dz_RV = torch.special.xlogy(p_RV, p_RV).mul_(-d_entropy_R.unsqueeze(-1))
            dz_RV -= p_RV * (weight_R + entropy_R * d_entropy_R).unsqueeze(-1)
        else:
            dz_RV = p_RV * -weight_R.unsqueeze(-1)
        local_E, inside_E = _local_labels(labels_E, ctx.shard, p_RV.shape[-1])
        dz_RV.index_put_((rows_E, local_E), torch.where(inside_E, d_log_probs_E, 0.0), accumulate=True)
        return dz_RV, None, None, None, None


def _local_labels(labels_E: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor]:
    """Each label's column on this rank (clamped into it), and whether it is really there."""
    local_E = labels_E - shard.start
    return local_E.clamp(0, size - 1), (local_E >= 0) & (local_E < size)
