"""The Triton kernels without a GPU: numerics in Triton's interpreter, compilation for devices that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux)")

from psrl.errors import UnsupportedError
from psrl.runtime.attention.triton import aot
from psrl.runtime.attention.triton.configs import DTYPES, kernel_config, split_head_dim

REPOSITORY = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 90, 100)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def run_in_interpreter(markers, *cases):
    """Triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", markers,
               *(f"tests/interpreter/{name}" for name in cases)]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("PYTEST_ADDOPTS", None)
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]


def test_kernels_in_the_interpreter():
    run_in_interpreter("not slow", "attention_cases.py", "benchmark_cases.py")


@pytest.mark.slow
def test_kernels_in_the_interpreter_on_200_forests():
    run_in_interpreter("slow", "attention_cases.py")


def keys_of(capability, **changes):
    launches = aot.sample_launches(128, 128, torch.bfloat16, capability, **changes)
    return {aot.compile_key(launch, capability) for launch in launches}


@pytest.mark.parametrize("path_lens", [(), (7,), (16, 1, 300)], ids=["dense", "one_block", "three_blocks"])
def test_a_new_length_compiles_nothing(path_lens):
    """Lengths, layers, numbers of tiles and tables' addresses are no part of what compiled kernels are keyed on."""
    known = keys_of(90, num_tokens=48, path_lens=(5, 6) if path_lens else ())
    for num_tokens in (1, 2, 16, 17, 63, 128, 1000):
        launches = aot.sample_launches(128, 128, torch.bfloat16, 90, num_tokens, path_lens)
        kinds = {launch.kernel for launch in launches}
        new = keys_of(90, num_tokens=num_tokens, path_lens=path_lens)
        assert {key for key in new if key[0] in {x[0] for x in known}} <= known and len(kinds) >= 4


def test_merge_kernels_know_no_length_either():
    # One head and few queries against a long path: rows are cut, and their parts merged.
    heads = {"num_heads": 1, "num_kv_heads": 1}
    long = [keys_of(90, num_tokens=num_tokens, path_lens=(4000,), **heads) for num_tokens in (3, 40)]
    assert len(long[0]) == 6 and long[0] == long[1]  # forward, its merge, delta, dQ, its sum, dK/dV


def test_compiles_for_a_device_that_is_not_there():
    launch = next(aot.sample_launches(64, 64, torch.bfloat16, 90, path_lens=(5,)))
    resources = aot.compile_launch(launch, 90)
    assert resources.spill_bytes == 0 and 0 < resources.registers <= 255
    assert 0 < resources.shared_bytes <= aot.SHARED_MEMORY[90]


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_default_tiles_fit_every_device(capability, head_dims):
    for path_lens in ((), (5,)):
        for launch in aot.sample_launches(*head_dims, torch.bfloat16, capability, path_lens=path_lens):
            resources = aot.compile_launch(launch, capability)
            assert resources.shared_bytes <= aot.SHARED_MEMORY[capability], launch.kernel
            assert resources.spill_bytes == 0, (launch.kernel, resources)


@pytest.mark.parametrize(
    ("dim", "parts"), [(16, (16, 0)), (64, (64, 0)), (96, (64, 32)), (128, (128, 0)), (192, (128, 64)), (256, (256, 0))]
)
def test_head_dim_parts(dim, parts):
    assert split_head_dim(dim) == parts


@pytest.mark.parametrize("dim", [0, 8, 24, 72, 112, 320, 512])
def test_other_head_dims_are_refused(dim):
    with pytest.raises(UnsupportedError, match=f"got {dim}: set psrl.attention_backend to sdpa or flash"):
        split_head_dim(dim)


def test_float64_is_refused_and_every_default_has_a_tile():
    with pytest.raises(UnsupportedError, match="takes bfloat16 or float16 or float32, got float64"):
        kernel_config(64, 64, torch.float64, 9)
    for dtype in DTYPES:
        for major in (7, 8, 9, 10, 12):
            for dims in (*HEAD_DIMS, (16, 16), (96, 96)):
                config = kernel_config(*dims, dtype, major)
                assert all(x & (x - 1) == 0 and x >= 16 for blocks in config[:3] for x in blocks[:2])
