"""Devices, and what of psrl runs on them: every attention backend is run and compared with the dense one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from psrl.config import ATTENTION_BACKENDS
from psrl.doctor.finding import Finding, State
from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout, resolve_backend

_DEVICES, _BACKENDS = "devices", "attention backends"
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value."""


def check_devices() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
        if properties.major < 8:
            yield Finding(_DEVICES, f"cuda:{index}", State.WRONG, detail, "use a GPU of capability 8.0 or newer")
        else:
            yield Finding(_DEVICES, f"cuda:{index}", State.OK, detail)
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no device"
        if torch.version.cuda is None:
            build = f"torch {torch.__version__} is built without CUDA"
        yield Finding(
            _DEVICES, "cuda", State.ABSENT, build, "for GPUs: a CUDA build of torch and a driver that nvidia-smi shows"
        )
    yield Finding(_DEVICES, "cpu", State.OK, f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    if not dist.is_gloo_available():
        yield Finding(_DEVICES, "gloo", State.WRONG, "torch is built without it", "install another build of torch")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield Finding(_DEVICES, "nccl", State.WRONG, "torch is built without it", "install another build of torch")


def check_backends() -> Iterator[Finding]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    default = resolve_backend("auto", device)
    for backend in ATTENTION_BACKENDS:
        if backend in ("auto", "reference"):
            continue
        name = f"{backend} (auto)" if backend == default else backend
        try:
            error = backend_error(backend, device, dtype)
        except UnsupportedError as refusal:
            yield Finding(
                _BACKENDS, name, State.WRONG if backend == default else State.ABSENT, str(refusal), f"use {default}"
            )
            continue
        # A backend that fails in whatever way is what is looked for here.
        except Exception as failure:
            text = " ".join(str(failure).split())[:200]
            yield Finding(
                _BACKENDS, name, State.WRONG, f"{type(failure).__name__}: {text}", f"psrl.attention_backend={default}"
            )
            continue
        detail = f"forward and backward within {error:.0e} of dense float64 attention on {device} in {dtype}"
        if error <= _TOLERANCE[dtype]:
            yield Finding(_BACKENDS, name, State.OK, detail)
        else:
            yield Finding(_BACKENDS, name, State.WRONG, detail, "do not use it; report it with this output")


def backend_error(backend: str, device: str, dtype: torch.dtype) -> float:
    """Largest difference of output and gradients from dense float64 attention, over the largest value of each.

    A trunk of 40 tokens with two branches of 30, 4 query heads on 2 key/value heads of 64.

    Raises:
        UnsupportedError: the backend cannot run here.
    """
    first = torch.cat([torch.arange(40), torch.arange(40, 100)]).numpy()
    last = torch.cat([torch.full((40,), 100), torch.full((30,), 70), torch.full((30,), 100)]).numpy()
    layout = AttentionLayout.build(first, last, 100)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(100, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2)]
    grad_out = torch.randn(100, 4, 64, generator=generator).to(dtype)

    def run(backend: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(device, dtype, copy=True).requires_grad_() for x in inputs)
        out = attend_layout(q, k, v, layout, backend=backend)
        out.backward(grad_out.to(device, dtype))
        return [x.detach().double().cpu() for x in (out, q.grad, k.grad, v.grad) if x is not None]

    wanted = run("reference", "cpu", torch.float64)
    got = run(backend, device, dtype)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))
