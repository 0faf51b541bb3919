"""What every attention backend gets, and the checks that come before it.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dimension (of q and k), W of v.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from psrl.runtime.attention.kept import KeptResult
from psrl.runtime.attention.layout import AttentionLayout


class AttentionBackend(Protocol):
    """Attention of T queries to S keys under an interval mask, differentiable in q, k and v."""

    def __call__(self, q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout, scale: float, /) -> Tensor:
        """[T, N, W]. Inputs are checked, may be strided, and are not changed; a query that sees no key gives 0.

        Raises:
            UnsupportedError: the backend cannot run these dtypes or head dimensions on this device.
        """
        ...


class KeepingBackend(Protocol):
    """A backend that can keep its result for pass 2, or take the kept one; see ``made_once``."""

    def __call__(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout, scale: float, place: KeptResult, /
    ) -> Tensor: ...


def check_inputs(q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout) -> None:
    """Raises ValueError with the offending shapes, dtypes or devices."""
    tensors = {"q": q_TNH, "k": k_SKH, "v": v_SKW}
    if any(x.dim() != 3 for x in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"q, k and v must be [tokens, heads, head dim], got {shapes}")
    for kind in ("dtype", "device"):
        kinds = [str(getattr(x, kind)) for x in tensors.values()]
        if len(set(kinds)) > 1:
            raise ValueError(f"q, k and v must have one {kind}, got {', '.join(kinds)}")
    if not q_TNH.is_floating_point():
        raise ValueError(f"q, k and v must be floating point, got {q_TNH.dtype}")
    if k_SKH.shape[:2] != v_SKW.shape[:2]:
        raise ValueError(f"k and v must have the same tokens and heads, got {tuple(k_SKH.shape)}, {tuple(v_SKW.shape)}")
    if q_TNH.shape[2] != k_SKH.shape[2]:
        raise ValueError(f"q and k must have the same head dim, got {q_TNH.shape[2]} and {k_SKH.shape[2]}")
    num_heads, num_kv_heads = q_TNH.shape[1], k_SKH.shape[1]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {num_heads} and {num_kv_heads}")
    if (q_TNH.shape[0], k_SKH.shape[0]) != (layout.num_queries, layout.num_keys):
        raise ValueError(
            f"the layout is for {layout.num_queries} queries and {layout.num_keys} keys, "
            f"got {q_TNH.shape[0]} and {k_SKH.shape[0]}"
        )
