"""The output layer of a GPTModel: only rows that own an edge reach it, and on demand only some of them at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor, nn

from psrl.runtime.session import active_micro_batch


def select_output_rows(output_layer: nn.Module) -> None:
    """Only rows that own an edge reach the output layer: [T, 1, hidden] becomes [R, 1, hidden]. Mutates the layer.

    Under sequence parallelism the layer would gather its input, [T / tp, 1, hidden] on every rank, and scatter the
    gradient. Rows are chosen from the gathered input instead, so the layer has to work as without: a column-parallel
    one then sums the input's gradient over ranks, a value head has all rows on every rank.
    """
    layer: Any = output_layer
    is_scattered = bool(getattr(layer, "sequence_parallel", False))
    if is_scattered:
        layer.sequence_parallel = False
        if isinstance(layer, ColumnParallelLinear):
            layer.allreduce_dgrad = True
        else:
            layer.weight.sequence_parallel = False  # its gradient is complete on every rank
    output_layer.register_forward_pre_hook(partial(_keep_output_rows, is_scattered), with_kwargs=True)


def _keep_output_rows(is_scattered: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden, *rest = args
    if is_scattered:
        # The gradient that comes back is complete on every rank: each takes its share of it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    micro_batch = active_micro_batch()
    if micro_batch is not None:
        hidden = hidden.index_select(0, micro_batch.rows_R)
    return (hidden, *rest), kwargs


class PostponedOutputLayer:
    """Takes a column-parallel output layer out of the model's forward, which then ends with the layer's input rows.

    The layer's hooks run where they did; ``logits`` is called for a chunk of rows at a time, or ``weight`` is read.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Mutates ``layer``."""
        self._layer: Any = layer
        self._forward = layer.forward
        self._weight: Tensor | None = None
        layer.forward = self._postpone

    @property
    def num_columns(self) -> int:
        """Vocabulary entries on this rank."""
        return self._layer.output_size_per_partition

    @property
    def weight(self) -> Tensor:
        """[columns of this rank, D] the layer's own, or the embedding's that the model has it use."""
        return self._layer.weight if self._weight is None else self._weight

    def _postpone(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        self._weight = weight
        micro_batch = active_micro_batch()
        if micro_batch is not None and not len(micro_batch.edge_labels_e):
            # Nothing is computed of these rows, but the weight gets its gradient, of zeros, in every micro-batch:
            # Megatron-Core's overlap_grad_reduce waits for one from every parameter in the last.
            hidden = hidden + 0.0 * self.weight[:1].sum()
        return hidden, None

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R, columns of this rank] of rows as the model's forward returned them, in any float dtype."""
        logits, _ = self._forward(hidden_RD.to(self.weight.dtype).unsqueeze(1), weight=self._weight)
        return logits.squeeze(1)
