"""Choice of the attention backend; the public functions.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dimension.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from psrl.config import ATTENTION_BACKENDS
from psrl.errors import ConfigError, UnsupportedError
from psrl.runtime.attention.base import AttentionBackend, KeepingBackend, check_inputs
from psrl.runtime.attention.kept import KEEPING_BACKENDS, KeptResult
from psrl.runtime.attention.layout import AttentionLayout


def resolve_backend(backend: str, device_type: str) -> str:
    """The backend that ``auto`` means on a device that nothing was measured on; any other name is itself.

    Raises:
        ConfigError: ``backend`` is unknown.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ConfigError(f"psrl.attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend
    return "triton" if device_type == "cuda" else "sdpa"


@functools.cache
def _load(backend: str) -> AttentionBackend:
    """Import a backend when it is first asked for: Triton and FlexAttention are slow to import and may be absent."""
    if backend == "reference":
        from psrl.runtime.attention.reference import reference_attention as attention
    elif backend == "sdpa":
        from psrl.runtime.attention.sdpa import sdpa_attention as attention
    elif backend == "flash":
        from psrl.runtime.attention.flash import flash_attention as attention
    elif backend == "flex":
        from psrl.runtime.attention.flex import flex_attention_backend as attention
    else:
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError(
                "attention backend 'triton' needs Triton: pip install triton, or set psrl.attention_backend=sdpa"
            )
        from psrl.runtime.attention.triton import triton_attention as attention
    return attention


def attend(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    first_S: Tensor | ArrayLike,
    last_S: Tensor | ArrayLike,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention where key s is visible to the queries ``first_S[s] <= q < last_S[s]``.

    Builds an ``AttentionLayout`` for one call; layers that share a mask build it once and use ``attend_layout``, which
    documents the arguments and errors.

    Args:
        first_S: [S] integers (tensor, array or sequence), at least 0.
        last_S: [S] integers, at most T; at most ``first_S`` for a key that no query sees.

    Raises:
        ValueError: also for intervals that leave the queries.
    """
    first, last = (x.numpy(force=True) if isinstance(x, Tensor) else np.asarray(x) for x in (first_S, last_S))
    layout = AttentionLayout.build(first, last, len(q_TNH))
    return attend_layout(q_TNH, k_SKH, v_SKH, layout, scale=scale, backend=backend)


def attend_layout(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
    backend: str = "auto",
    place: KeptResult | None = None,
) -> Tensor:
    """[T, N, H] softmax attention under the mask of ``layout``, differentiable in q, k and v; deterministic.

    Query head n reads key/value head ``n // (N / K)``. A query that sees no key gets 0, and sends no gradient.
    The inputs may be strided views; none is changed.

    Args:
        scale: factor of the scores; None means ``H ** -0.5``.
        backend: ``reference`` is dense, for tests, and takes any float dtype and a v with its own head dim. The
            others take time proportional to visible pairs: ``triton`` is one kernel over exactly the visible tiles
            (CUDA; v may have its own head dim), ``flash`` runs variable-length calls of the installed flash-attn
            (CUDA), ``sdpa`` runs tiles on PyTorch's flash kernels (q, k and v padded to one head dim), ``flex`` is
            PyTorch's FlexAttention (forward only on CPU; not deterministic on FlashAttention-4). ``auto`` is
            ``triton`` on CUDA and ``sdpa`` elsewhere; engines measure (``trial``).
        place: where the result is kept for pass 2, or read in pass 2. None: neither.

    Raises:
        ConfigError: ``backend`` is unknown.
        PlanError: nothing was kept at ``place``.
        UnsupportedError: the backend cannot run this device, dtype or head dimension, or cannot keep its result.
        ValueError: shapes, dtypes or devices do not fit together or to the layout.
    """
    name = resolve_backend(backend, q_TNH.device.type)
    attention = _load(name)
    check_inputs(q_TNH, k_SKH, v_SKH, layout)
    factor = q_TNH.shape[2] ** -0.5 if scale is None else float(scale)
    if place is None:
        return attention(q_TNH, k_SKH, v_SKH, layout, factor)
    if name not in KEEPING_BACKENDS:
        raise UnsupportedError(f"attention backend {name!r} cannot keep its result; {KEEPING_BACKENDS} can")
    return cast(KeepingBackend, attention)(q_TNH, k_SKH, v_SKH, layout, factor, place)
