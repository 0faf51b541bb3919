"""Attention whose kernels read the cached path in its blocks and add its gradients to their accumulators.

Nothing of the path is copied: a layer allocates local keys, values and their gradients only.

Shape legend: T local tokens, padding at the end included, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from torch import Tensor

from psrl.runtime.exchange import end_layer, exchange_kv
from psrl.runtime.path_tables import PathTables
from psrl.runtime.session import Execution


def attend_in_place(
    execution: Execution,
    tables: PathTables,
    layer: int,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    scale: float | None,
) -> Tensor:
    """[T, N, H]: attention of a micro-batch to its path and to itself.

    Pass 1 writes a spine micro-batch's K/V to the cache. In pass 2 the backward adds the path's gradients to the cache,
    and to the local gradients what descendants accumulated (the KV tap).

    Args:
        tables: of the execution.
        layer: index among the layers of this model chunk.
        scale: factor of the scores; None means ``H ** -0.5``.

    Raises:
        UnsupportedError: no kernel for this device, dtype or head dim.
    """
    from psrl.runtime.attention.triton import attend_path  # imports Triton

    local = exchange_kv(execution, layer, k_TKH, v_TKH)
    path_grads = tables.grads if execution.backward else None
    layout = execution.micro_batch.layout
    place = execution.kept_result(layer)
    out_TNH = attend_path(q_TNH, local.k, local.v, layout, tables.path(), layer, path_grads, scale, place)
    if not execution.backward:
        end_layer(execution)  # not before the kernel is in the queue: it may free the path
    return out_TNH
