"""Log-probs and entropies of a micro-batch's edges from the output layer's rows, in one of three ways.

Shape legend: R logit rows of this rank, e edges of these rows, D hidden, V vocabulary entries on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from torch import Tensor, nn
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.output_layer import PostponedOutputLayer
from psrl.integrations.megatron.passes import vocab_shard_group
from psrl.integrations.verl.engine.fused_options import one_temperature
from psrl.runtime.outputs import VocabShard, chunked_edge_log_probs, edge_log_probs
from psrl.runtime.session import BoundMicroBatch

EdgeOutputs = Callable[[BoundMicroBatch, Tensor, bool], tuple[Tensor, Tensor | None]]
"""From a micro-batch, the rows [R, columns] that the model's forward returned, and whether entropies are wanted, to
log-probs [e] and entropies [e] or None. Differentiable; collective over tensor-parallel ranks."""


def edge_outputs(layer: nn.Module, *, max_logit_rows: int | None, fused: bool) -> EdgeOutputs:
    """How the model that ends with ``layer`` computes them. Mutates the layer unless all its logits are to exist.

    Raises:
        UnsupportedError: ``fused``, and the layer is more than a column-parallel product.
    """
    if fused:
        return FusedRows(layer)
    return _all_rows if max_logit_rows is None else ChunkedRows(layer)


def _all_rows(micro_batch: BoundMicroBatch, rows: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Rows are logits."""
    return edge_log_probs(
        rows,
        micro_batch.row_temperature_R,
        micro_batch.edge_rows_e,
        micro_batch.edge_labels_e,
        shard=_shard(rows.shape[-1]),
        with_entropy=with_entropy,
    )


class ChunkedRows:
    """``psrl.max_logit_rows``: rows are the output layer's input, logits exist for a chunk of them at a time."""

    def __init__(self, layer: nn.Module) -> None:
        """Mutates ``layer``."""
        self._layer = PostponedOutputLayer(layer)

    def __call__(self, micro_batch: BoundMicroBatch, rows: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return chunked_edge_log_probs(
            rows,
            self._layer.logits,
            micro_batch.row_temperature_R,
            micro_batch.edge_rows_e,
            micro_batch.edge_labels_e,
            micro_batch.row_chunks,
            shard=_shard(self._layer.num_columns),
            with_entropy=with_entropy,
        )


class FusedRows:
    """``use_fused_kernels``: rows are the output layer's input, veRL's fused linear cross-entropy does the rest."""

    def __init__(self, layer: nn.Module) -> None:
        """Mutates ``layer``.

        Raises:
            UnsupportedError: the layer is more than a column-parallel product, an adapted one for example.
        """
        if not isinstance(layer, ColumnParallelLinear):
            raise UnsupportedError(
                f"use_fused_kernels=True reads the output layer's weight, but the layer is a {type(layer).__name__}, "
                "which computes more than a product with it: leave output_layer out of model.lora.target_modules, or "
                "set use_fused_kernels=False"
            )
        self._layer = PostponedOutputLayer(layer)

    def __call__(self, micro_batch: BoundMicroBatch, rows: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = fused_edge_log_probs(
            rows,
            self._layer.weight,
            one_temperature(micro_batch.plan.row_temperature_R),
            micro_batch.edge_rows_e,
            micro_batch.edge_labels_e,
            vocab_shard_group(),
        )
        return log_probs, entropy if with_entropy else None


def fused_edge_log_probs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    temperature: float,
    edge_rows_e: Tensor,
    edge_labels_e: Tensor,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """``edge_log_probs`` of ``hidden @ weight.T`` by veRL's kernel (verl/utils/kernel/linear_cross_entropy.py), without
    the logits. Differentiable in both; collective over tensor-parallel ranks.

    The kernel takes one label a row, so a row is given once for each of its edges: where it branches it is copied, and
    computed, that often. That costs (e - R) rows of the products of forward and backward, and where e > R a copy
    [e, D] of the rows in the weight's dtype. It is kept for the backward with three numbers an edge. The backward has
    gradients of 9,504 columns of the logits at a time, [e, 9504] in the weight's dtype, and a gradient of the whole
    weight.

    Products are in the weight's dtype and accumulated in float32 (float32 ones are rounded to TF32 where the kernel
    runs on a GPU). The kernel's sum of exponentials is taken over logits less max(0, the largest logit): rows whose
    logits are all far below zero (-80) lose precision.

    Args:
        hidden_RD: rows in any float dtype; equal on tensor-parallel ranks, as is their gradient.
        weight_VD: the output layer's, or of this rank's share of the vocabulary.
        temperature: divides the logits.
        edge_rows_e: each edge's row, ascending; every row has an edge, or there are no edges at all.
        group: tensor-parallel ranks that split the vocabulary; None: one rank has all of it.

    Returns:
        log-probs [e] and entropies [e], float32.
    """
    num_edges = len(edge_rows_e)
    if not num_edges:
        none_e = hidden_RD[:0, 0].float()
        return none_e, none_e
    if group is not None:
        # Each rank has the gradient through its share of the vocabulary only; the kernel does not add them up.
        hidden_RD = copy_to_tensor_model_parallel_region(hidden_RD, group)
    hidden_eD = hidden_RD.to(weight_VD.dtype)
    if num_edges > len(hidden_RD):
        hidden_eD = hidden_eD[edge_rows_e]  # its backward adds in a fixed order, unlike index_select's
    if num_edges == 1:
        # Triton makes a constant of a size of 1, which the kernel treats as a tensor: it does not compile.
        hidden_eD, edge_labels_e = hidden_eD.expand(2, -1), edge_labels_e.expand(2)
    log_probs_e, entropy_e = linear_cross_entropy(
        hidden_eD.contiguous(), weight_VD, edge_labels_e.contiguous(), temperature, "none", group
    )
    return log_probs_e[:num_edges], entropy_e[:num_edges]


def _shard(num_columns: int) -> VocabShard:
    """This rank's share of the vocabulary."""
    group = vocab_shard_group()
    return VocabShard(0 if group is None else num_columns * mpu.get_tensor_model_parallel_rank(), group)
