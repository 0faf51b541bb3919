"""``use_fused_kernels``: veRL's fused linear cross-entropy in the interpreter, compiled, and where it is refused.

``test_path_in_place.py`` runs the quick cases in the interpreter.
"""

import pytest
import torch
from transformers import Qwen3Config

from psrl.config import PSRLConfig
from psrl.errors import UnsupportedError
from psrl.integrations.verl.engine.config import PSRLEngineConfig
from psrl.integrations.verl.engine.edge_outputs import edge_outputs
from psrl.integrations.verl.engine.fused_options import check_fused_batch, check_fused_kernels, one_temperature
from tests.helpers import make_checkpoint, make_worker
from tests.helpers.fused import compile_kernels
from tests.integration.test_support import engine, model
from tests.unit.test_triton_attention import run_in_interpreter

pytest.importorskip("triton", reason="needs Triton (Linux)")


@pytest.mark.slow
def test_in_the_interpreter_on_more_forests_and_layouts():
    run_in_interpreter("slow", "fused_cases.py")


def test_kernels_do_not_compile_for_one_row():
    """Why one edge is given twice. Where this fails, ``fused_edge_log_probs`` need not do it."""
    from triton.compiler.errors import CompilationError

    assert compile_kernels(90, num_edges=2, only="epilogue") == ["efficient_entropy_triton_kernel_epilogue"]
    with pytest.raises(CompilationError):
        compile_kernels(90, num_edges=1, only="epilogue")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("vocab", [1000, 151_936])
@pytest.mark.parametrize("num_edges", [2, 3, 16])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, num_edges, vocab, parallel):
    """For a device that is not there, with the specialisations of small sizes; sm_90 with its tensor-memory loads."""
    kernels = compile_kernels(capability, num_edges=num_edges, vocab=vocab, parallel=parallel)
    assert len(kernels) == (4 if parallel else 3)


FUSED = {"use_fused_kernels": True}


def check(config: PSRLEngineConfig, hidden=128, device="cuda", is_value_model=False, **options):
    hf_config = Qwen3Config(hidden_size=hidden)
    check_fused_kernels(config, model(hf_config, **options), device=device, is_value_model=is_value_model)


def test_where_it_is_supported():
    check(engine(**FUSED))
    check(engine(**FUSED), hidden=3584, lora={"rank": 8, "target_modules": ["linear_qkv"]})
    check(engine(), hidden=100, device="cpu", is_value_model=True)  # not asked for


@pytest.mark.parametrize(
    ("says", "options"),
    [
        (r"the device is cpu\): set it to False, and psrl.max_logit_rows", {"device": "cpu"}),
        ("a value head has no cross-entropy", {"is_value_model": True}),
        (r"hidden sizes that 128 divides, not 900\)", {"hidden": 900}),
        (
            r"psrl.max_logit_rows=64 could bound\): set one of them",
            {"config": engine(**FUSED, psrl=PSRLConfig(max_logit_rows=64))},
        ),
        (
            "model.lora.target_modules adapts.*leave out output_layer",
            {"lora": {"rank": 8, "target_modules": ["linear_qkv", "*.output_layer"]}},
        ),
    ],
)
def test_where_it_is_refused(says, options):
    with pytest.raises(UnsupportedError, match=says) as error:
        check(**{"config": engine(**FUSED), **options})
    assert str(error.value).startswith("use_fused_kernels=True rules out prefix sharing (")


def test_an_output_layer_that_is_more_than_a_product_is_refused():
    with pytest.raises(UnsupportedError, match=r"the layer is a Sequential, .*leave output_layer out"):
        edge_outputs(torch.nn.Sequential(), max_logit_rows=None, fused=True)


def test_an_engine_on_a_cpu_is_refused(tmp_path):
    """And not where prefixes are not shared: there it is veRL's own path."""
    folder = make_checkpoint(tmp_path, "qwen3", hidden=128)
    with pytest.raises(UnsupportedError, match=r"use_fused_kernels=True .*the device is cpu"):
        make_worker(folder, psrl=PSRLConfig(), dtype="float32", model=FUSED)
    chunk = make_worker(folder, dtype="float32", model=FUSED).engine.module[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert hasattr(chunk.module, "forward_backup")  # of verl/models/mcore/model_forward_fused.py


def test_temperatures():
    temperatures = torch.tensor([0.7, 0.7], dtype=torch.float32).double().numpy()
    assert one_temperature(temperatures) == pytest.approx(0.7, abs=1e-7)
    assert one_temperature(temperatures[:0]) == 1.0 and one_temperature(0.0 * temperatures) == 1e-8
    check_fused_batch(False, False, temperatures * [1.0, 2.0])
    with pytest.raises(UnsupportedError, match=r"temperatures from 0\.7 to 1\.4, .*give them one temperature, or set"):
        check_fused_batch(True, True, temperatures * [1.0, 2.0])
    with pytest.raises(UnsupportedError, match=r"temperatures from inf to inf"):
        one_temperature(temperatures / 0.0)
    with pytest.raises(UnsupportedError, match=r"use_fused_kernels=True in a batch, .* built with False"):
        check_fused_batch(True, False, temperatures)
