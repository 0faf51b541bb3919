"""PyTorch's flash attention kernels behind one signature, one class a device.

Tensors are ``[batch, heads, tokens, head dim]`` views and may be strided; the last dimension is dense. Log-sum-exp is
natural, of the scaled scores, ``[batch, heads, tokens]`` in float32 (float64 for float64). Both kernels take fewer
key/value heads than query heads as they are, except the CPU's before torch 2.13, which gets repeated heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from psrl.errors import UnsupportedError

_aten = torch.ops.aten


class FlashKernel(Protocol):
    """Softmax attention of one tile, dense or (``is_causal``, as many keys as queries) lower triangular."""

    dtypes: tuple[torch.dtype, ...]
    widens_half: bool
    """Whether bfloat16 and float16 are computed in float32 where results of several tiles meet."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, log-sum-exp, and what ``backward`` wants back from any one call."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        extra: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given the output and log-sum-exp over *all* keys of each query, as in ring
        attention: they make the tile's share of the softmax, and so its gradients, the exact ones."""
        ...


class CpuFlashKernel:
    """``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``."""

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    # The kernel is as fast in float32, and sums gradients in the tensors' own dtype.
    widens_half = True

    def __init__(self, takes_grouped_heads: bool | None = None) -> None:
        """
        Args:
            takes_grouped_heads: whether the kernel reads fewer key/value heads; None: by torch's version.
        """
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        self._takes_grouped_heads = version >= (2, 13) if takes_grouped_heads is None else takes_grouped_heads

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        k, v = (self._repeat_heads(x, q.shape[1]) for x in (k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse, ()

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        extra: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = k.shape[1]
        k, v = (self._repeat_heads(x, q.shape[1]) for x in (k, v))
        grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad_out, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
        if grad_k.shape[1] != num_kv_heads:
            grad_k, grad_v = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def _repeat_heads(self, x: Tensor, num_heads: int) -> Tensor:
        repeats = num_heads // x.shape[1]
        return x if repeats == 1 or self._takes_grouped_heads else x.repeat_interleave(repeats, dim=1)


class CudaFlashKernel:
    """FlashAttention-2 as built into PyTorch, ``aten/src/ATen/native/transformers/cuda/attention.cu``."""

    dtypes = (torch.bfloat16, torch.float16)
    widens_half = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            raise UnsupportedError(
                f"attention backend 'sdpa' on CUDA takes head dims that are multiples of 8 up to 256, got {q.shape[-1]}"
            )
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse, (seed, offset)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        extra: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed, offset = extra
        with deterministic_algorithms():
            return _aten._scaled_dot_product_flash_attention_backward.default(
                grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
                0.0, is_causal, seed, offset, scale=scale,
            )  # fmt: skip


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """The CUDA backward sums the queries' gradients with atomic adds unless PyTorch's global switch is on."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


KERNELS: dict[str, FlashKernel] = {"cpu": CpuFlashKernel(), "cuda": CudaFlashKernel()}


def flash_kernel(device: torch.device, dtype: torch.dtype) -> FlashKernel:
    """The kernel for tensors of ``dtype`` on ``device``.

    Raises:
        UnsupportedError: there is none; the message names the dtypes that work.
    """
    kernel = KERNELS.get(device.type)
    if kernel is None:
        devices = " and ".join(KERNELS)
        raise UnsupportedError(f"attention backend 'sdpa' runs on {devices}, got tensors on {device.type}")
    if dtype not in kernel.dtypes:
        names = " or ".join(str(x).removeprefix("torch.") for x in kernel.dtypes)
        raise UnsupportedError(
            f"attention backend 'sdpa' takes {names} on {device.type}, got {str(dtype).removeprefix('torch.')}: "
            "change the model's dtype, or set psrl.attention_backend=reference for a small test"
        )
    return kernel
