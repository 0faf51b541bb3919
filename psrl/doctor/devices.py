"""Devices, and what of psrl runs on them: every attention backend is run and compared with the dense one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from psrl.config import ATTENTION_BACKENDS
from psrl.doctor.finding import Finding, State
from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout, path_access, resolve_backend
from psrl.runtime.attention.records import device_name, records_folder, slug
from psrl.runtime.attention.trial import Fan

_DEVICES, _BACKENDS = "devices", "attention backends"
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value."""
_TRUNK, _BRANCH = 40, 30
"""Tokens of what backends are tried on."""


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
    if device == "cuda":
        yield _measurements(torch.device(device, 0))
    for backend in ATTENTION_BACKENDS:
        if backend in ("auto", "reference"):
            continue
        name = f"{backend} (auto)" if backend == default and device == "cpu" else backend
        access = path_access(backend)
        try:
            error = backend_error(backend, device, dtype)
            if access.in_place:
                error = max(error, in_place_error(device, dtype))
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
        detail = f"forward and backward within {error:.0e} of dense float64 attention on {device} in {dtype}; {access}"
        if error <= _TOLERANCE[dtype]:
            yield Finding(_BACKENDS, name, State.OK, detail)
        else:
            yield Finding(_BACKENDS, name, State.WRONG, detail, "do not use it; report it with this output")


def _measurements(device: torch.device) -> Finding:
    """What ``auto`` and the Triton kernels' tiles go by."""
    name, folder = device_name(device), records_folder()
    found = [path.stem for path in sorted(folder.glob("*.json")) if slug(name) in path.stem]
    detail = f"auto is measured when a job starts; on {name} so far: {', '.join(found) or 'nothing'} (in {folder})"
    if any(stem.startswith("tiles") for stem in found):
        return Finding(_BACKENDS, "measured", State.OK, detail)
    return Finding(_BACKENDS, "measured", State.ABSENT, f"{detail}; tiles are the default", "psrl tune MODEL")


def backend_error(backend: str, device: str, dtype: torch.dtype) -> float:
    """Largest difference of output and gradients from dense float64 attention, over the largest value of each.

    A trunk of 40 tokens with two branches of 30, 4 query heads on 2 key/value heads of 64.

    Raises:
        UnsupportedError: the backend cannot run here.
    """
    layout = _forest(0)
    *inputs, grad_out = _random_inputs(0, dtype)
    got = _run(inputs, grad_out, layout, backend, device, dtype)
    return _largest_error(got, _run(inputs, grad_out, layout, "reference", "cpu", torch.float64))


def in_place_error(device: str, dtype: torch.dtype) -> float:
    """``backend_error`` where the trunk is a cached path in two blocks, which the Triton kernels read in place, in the
    second of two layers. Its gradients are those that they add to the accumulators.

    Raises:
        UnsupportedError: the kernels cannot run here.
    """
    from psrl.runtime.attention.triton import CachedPath, PathGrads, attend_path

    layout = _forest(_TRUNK)
    *inputs, grad_out = _random_inputs(_TRUNK, dtype)
    q, k, v = (x.to(device, copy=True) for x in inputs)
    k_blocks, v_blocks = (
        [torch.stack([torch.zeros_like(part), part]) for part in x[:_TRUNK].split([16, 24])] for x in (k, v)
    )
    dk_blocks, dv_blocks = ([torch.zeros(x.shape, device=device) for x in part] for part in (k_blocks, v_blocks))
    q_local, k_local, v_local = local = [x.clone().requires_grad_() for x in (q, k[_TRUNK:], v[_TRUNK:])]
    path = CachedPath.build(k_blocks, v_blocks)
    out = attend_path(q_local, k_local, v_local, layout, path, 1, lambda: PathGrads.build(dk_blocks, dv_blocks))
    dq, *local_grads = torch.autograd.grad(out, local, grad_out.to(device))
    key_grads = [
        torch.cat([*(x[1] for x in part), grad]) for part, grad in zip((dk_blocks, dv_blocks), local_grads, strict=True)
    ]
    got = [x.detach().double().cpu() for x in (out, dq, *key_grads)]
    return _largest_error(got, _run(inputs, grad_out, layout, "reference", "cpu", torch.float64))


def _forest(path_len: int) -> AttentionLayout:
    """The first ``path_len`` tokens are keys only."""
    return Fan(path_len, _TRUNK - path_len, 2, _BRANCH).layout()


def _random_inputs(path_len: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator, total = torch.Generator().manual_seed(0), _TRUNK + 2 * _BRANCH
    shapes = ((total - path_len, 4, 64), (total, 2, 64), (total, 2, 64), (total - path_len, 4, 64))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _run(
    inputs: list[torch.Tensor],
    grad_out: torch.Tensor,
    layout: AttentionLayout,
    backend: str,
    device: str,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    q, k, v = (x.to(device, dtype, copy=True).requires_grad_() for x in inputs)
    out = attend_layout(q, k, v, layout, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.to(device, dtype))
    return [x.detach().double().cpu() for x in (out, *grads)]


def _largest_error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))
