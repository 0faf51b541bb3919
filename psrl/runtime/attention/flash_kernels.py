"""Variable-length flash attention kernels behind one signature: FlashAttention 2, 3, 4 and the one built into PyTorch.

Tensors are ``[tokens, heads, head dim]`` with a dense last dimension; segment i of the queries, between its offsets in
``cu_q``, sees segment i of the keys. Log-sum-exp is natural, of the scaled scores, [heads, tokens] in float32. All
take fewer key/value heads than query heads as they are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.runtime.attention.kernels import deterministic_algorithms

log = logging.getLogger(__name__)


class Segments(NamedTuple):
    """Offsets of a call's segments, int32 on the device, and the longest segment."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    is_causal: bool
    """Lower triangular; segment i has as many keys as queries."""


class VarlenKernel(Protocol):
    name: str

    def takes(self, head_dim: int, v_head_dim: int) -> bool: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, log-sum-exp, and what ``backward`` wants back."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
        extra: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, deterministic, given output and log-sum-exp over *all* keys of each query."""
        ...


class TorchVarlenKernel:
    """FlashAttention-2 as built into PyTorch, ``aten/src/ATen/native/transformers/cuda/attention.cu``."""

    name = "torch"

    def takes(self, head_dim: int, v_head_dim: int) -> bool:
        return head_dim == v_head_dim <= 256 and head_dim % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float):
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward.default(
            q, k, v, segments.cu_q, segments.cu_k, segments.max_q, segments.max_k, 0.0, segments.is_causal, False,
            scale=scale,
        )  # fmt: skip
        return out, lse, (rng_state, unused)

    def backward(self, grad_out, q, k, v, out, lse, segments: Segments, scale: float, extra):
        with deterministic_algorithms():
            return torch.ops.aten._flash_attention_backward.default(
                grad_out, q, k, v, out, lse.contiguous(), segments.cu_q, segments.cu_k, segments.max_q, segments.max_k,
                0.0, segments.is_causal, *extra, scale=scale,
            )  # fmt: skip


class Flash2Kernel:
    """Package ``flash-attn`` 2.8, ``flash_attn/flash_attn_interface.py``."""

    name = "flash-attn 2"

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("flash_attn.flash_attn_interface")

    def takes(self, head_dim: int, v_head_dim: int) -> bool:
        return head_dim == v_head_dim <= 256 and head_dim % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float):
        out, lse, _, rng_state = self._api._flash_attn_varlen_forward(
            q, k, v, segments.cu_q, segments.cu_k, segments.max_q, segments.max_k, 0.0, scale,
            causal=segments.is_causal,
        )  # fmt: skip
        return out, lse, (rng_state,)

    def backward(self, grad_out, q, k, v, out, lse, segments: Segments, scale: float, extra):
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._api._flash_attn_varlen_backward(
            grad_out, q, k, v, out, lse.contiguous(), *grads, segments.cu_q, segments.cu_k, segments.max_q,
            segments.max_k, 0.0, scale, segments.is_causal, -1, -1, 0.0, None, True, rng_state=extra[0],
        )  # fmt: skip
        return grads


class Flash3Kernel:
    """Package ``flash_attn_3``, ``hopper/flash_attn_interface.py``."""

    name = "flash-attn 3"

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("flash_attn_interface")

    def takes(self, head_dim: int, v_head_dim: int) -> bool:
        # Deterministic backward stops short of 256.
        return (head_dim == v_head_dim <= 128 or (head_dim, v_head_dim) == (192, 128)) and head_dim % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float):
        out, lse, *_ = self._api._flash_attn_forward(
            q, k, v, cu_seqlens_q=segments.cu_q, cu_seqlens_k=segments.cu_k, max_seqlen_q=segments.max_q,
            max_seqlen_k=segments.max_k, softmax_scale=scale, causal=segments.is_causal,
        )  # fmt: skip
        return out, lse, ()

    def backward(self, grad_out, q, k, v, out, lse, segments: Segments, scale: float, extra):
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._api._flash_attn_backward(
            grad_out, q, k, v, out, lse.contiguous(), cu_seqlens_q=segments.cu_q, cu_seqlens_k=segments.cu_k,
            max_seqlen_q=segments.max_q, max_seqlen_k=segments.max_k, dq=dq, dk=dk, dv=dv, softmax_scale=scale,
            is_causal=segments.is_causal, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv


class Flash4Kernel:
    """Package ``flash-attn-4``, ``flash_attn/cute/interface.py``; called as ``torch/nn/attention/_fa4.py`` does."""

    name = "flash-attn 4"

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("flash_attn.cute.interface")

    def takes(self, head_dim: int, v_head_dim: int) -> bool:
        return (head_dim == v_head_dim <= 128 or (head_dim, v_head_dim) == (192, 128)) and head_dim % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float):
        out, lse = self._api._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=segments.is_causal, return_lse=True, cu_seqlens_q=segments.cu_q,
            cu_seqlens_k=segments.cu_k, max_seqlen_q=segments.max_q, max_seqlen_k=segments.max_k,
        )  # fmt: skip
        return out, lse, ()

    def backward(self, grad_out, q, k, v, out, lse, segments: Segments, scale: float, extra):
        return self._api._flash_attn_bwd(
            q, k, v, out, grad_out, lse.contiguous(), softmax_scale=scale, causal=segments.is_causal,
            cu_seqlens_q=segments.cu_q, cu_seqlens_k=segments.cu_k, deterministic=True,
        )  # fmt: skip


def varlen_kernel(device: torch.device, head_dim: int, v_head_dim: int) -> VarlenKernel:
    """The newest installed kernel made for the device that takes these head dims; PyTorch's own is always there.

    Raises:
        UnsupportedError: not a CUDA device, no kernel takes the head dims, or an installed one cannot be imported.
    """
    if device.type != "cuda":
        raise UnsupportedError(
            f"attention backend 'flash' runs on cuda, got tensors on {device.type}: set psrl.attention_backend=sdpa"
        )
    return _choose(torch.cuda.get_device_capability(device)[0], head_dim, v_head_dim)


@functools.cache
def _choose(major: int, head_dim: int, v_head_dim: int) -> VarlenKernel:
    candidates: list[tuple[str, type]] = [("flash_attn.flash_attn_interface", Flash2Kernel)]
    if major >= 9:
        candidates.insert(0, ("flash_attn.cute.interface", Flash4Kernel))
    if major == 9:
        candidates.insert(0, ("flash_attn_interface", Flash3Kernel))
    kernels = [_load(module, kind) for module, kind in candidates if is_installed(module)] + [TorchVarlenKernel()]
    for kernel in kernels:
        if kernel.takes(head_dim, v_head_dim):
            log.info("attention backend 'flash' runs %s for head dims %d and %d", kernel.name, head_dim, v_head_dim)
            return kernel
    names = ", ".join(kernel.name for kernel in kernels)
    raise UnsupportedError(
        f"attention backend 'flash' has no kernel for head dims {head_dim} and {v_head_dim} (has {names}): "
        "set psrl.attention_backend=triton"
    )


def _load(module: str, kind: type) -> VarlenKernel:
    """A package that was compiled for another torch is found, but its import fails."""
    try:
        return kind()
    except ImportError as error:
        raise UnsupportedError(
            f"attention backend 'flash': {module} is installed but cannot be imported ({error}): install it for torch "
            f"{torch.__version__}, uninstall it, or set psrl.attention_backend=triton"
        ) from error


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it (importing its parents)."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
