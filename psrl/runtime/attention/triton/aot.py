"""Compile launches for a device that need not be there, and read what the compiler says of them.

Signatures, alignments and constants are those that a launch on the device would have: they go through Triton's own
binder. ``cuobjdump`` comes with the Triton wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.triton.backend import PathGrads
from psrl.runtime.attention.triton.configs import kernel_config
from psrl.runtime.attention.triton.launch import (
    Backward,
    Keys,
    Launch,
    delta_launch,
    dkv_launches,
    dq_launches,
    forward_launches,
)
from psrl.runtime.attention.triton.path import CachedPath

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program may have, by compute capability: CUDA C programming guide, table "Technical
specifications per compute capability" (163, 227 and 227 KiB)."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Stack and local memory per thread; 0 where nothing is spilled."""
    shared_bytes: int
    """Per program."""


def compile_key(launch: Launch, capability: int) -> tuple[Any, ...]:
    """What Triton's cache of compiled kernels is keyed on: equal keys share one compiled kernel."""
    _, specialization, options = _bind(launch, GPUTarget("cuda", capability, 32))
    return launch.kernel, tuple(map(repr, specialization)), tuple(sorted(options.items()))


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile to machine code with the wheel's ``ptxas``.

    Args:
        capability: 80, 90 or 100, for sm_80, sm_90 and sm_100.
    """
    target = GPUTarget("cuda", capability, 32)
    bound, specialization, options = _bind(launch, target)
    options, signature, constants, attributes = launch.kernel._pack_args(
        make_backend(target), dict(launch.options), bound, specialization, options
    )
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled: Any = triton.compile(source, target=target, options=options.__dict__)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared)


def _bind(launch: Launch, target: GPUTarget) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
    return binder(**launch.args, **launch.options)


def sample_launches(
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    capability: int,
    num_tokens: int = 64,
    path_lens: tuple[int, ...] = (),
    num_heads: int = 8,
    num_kv_heads: int = 2,
) -> Iterator[Launch]:
    """Every launch of a forward and backward pass over one sequence, on tensors of the CPU, with the default tiles.

    Args:
        path_lens: tokens of the cached blocks before it; none for the form that takes dense keys.
    """
    num_path = sum(path_lens)
    ends = torch.full((num_path + num_tokens,), num_tokens)
    first = torch.cat([torch.zeros(num_path, dtype=torch.int64), torch.arange(num_tokens)])
    layout = AttentionLayout.build(first.numpy(), ends.numpy(), num_tokens)
    shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim), (num_heads, v_head_dim))
    q, k, v, out = (torch.empty(num_tokens, *shape, dtype=dtype) for shape in shapes)
    path, grads = None, (None, None)
    if path_lens:
        k_blocks, v_blocks = ([torch.empty(2, n, *x.shape[1:], dtype=dtype) for n in path_lens] for x in (k, v))
        path = CachedPath.build(k_blocks, v_blocks)
        grads = PathGrads.build([x.float() for x in k_blocks], [x.float() for x in v_blocks])
    lse = torch.empty(num_heads, num_tokens)
    config, scale, keys = kernel_config(head_dim, v_head_dim, dtype, capability // 10), head_dim**-0.5, Keys(k, v, path)
    inputs = Backward(q, keys, out, lse, lse, layout, scale, config)
    yield from forward_launches(q, keys, out, lse, layout, scale, config)
    yield delta_launch(out, out, lse)
    yield from dq_launches(inputs, q)
    yield from dkv_launches(inputs, k, v, *grads)
