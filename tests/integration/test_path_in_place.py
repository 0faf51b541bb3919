"""The cached path, read in its blocks by the Triton kernels: engines in Triton's interpreter, and the decision."""

import pytest

from psrl.config import PSRLConfig
from psrl.errors import PlanError
from psrl.integrations.verl.engine.observability import EngineProbe
from psrl.runtime.attention import path_access
from tests.helpers import make_checkpoint, make_worker
from tests.unit.test_triton_attention import run_in_interpreter


def test_engine_in_the_interpreter():
    """Those of ``test_fused_kernels.py`` too: one process imports for both."""
    run_in_interpreter("not slow", "engine_cases.py", "fused_cases.py")


@pytest.mark.slow
def test_engine_in_the_interpreter_on_more_forests():
    run_in_interpreter("slow", "engine_cases.py")


@pytest.mark.parametrize(
    ("backend", "options", "in_place", "says"),
    [
        ("triton", {}, True, "path in place"),
        ("triton", {"has_host_tier": True}, True, "path in place (gathered in mini-batches that use the host tier)"),
        (
            "triton",
            {"context_parallel": 2},
            False,
            "path gathered (context parallelism: every rank stores a shard of each block)",
        ),
        ("sdpa", {}, False, "path gathered"),
        ("flash", {"context_parallel": 2, "is_latent": True}, False, "path gathered"),
    ],
)
def test_the_decision(backend, options, in_place, says):
    access = path_access(backend, **options)
    assert (access.in_place, str(access)) == (in_place, says)


@pytest.mark.parametrize(
    ("kind", "psrl", "says"),
    [
        ("qwen3", {"attention_backend": "triton"}, "triton, path in place"),
        ("qwen3", {}, "sdpa (auto), path gathered"),
        ("qwen3", {"enable": False}, "sdpa (auto)"),
        (
            "deepseek_v3",
            {"attention_backend": "triton"},
            "triton, path gathered (latent attention: keys are made of the path's latents in every layer)",
        ),
    ],
)
def test_the_startup_line_says_it(tmp_path, kind, psrl, says):
    worker = make_worker(make_checkpoint(tmp_path, kind), psrl=PSRLConfig(**psrl), dtype="float32")
    assert EngineProbe(worker.engine).describe()["attention"] == says


def test_a_cache_that_lends_no_blocks_is_refused(tmp_path, monkeypatch):
    from psrl.cache import KVCache
    from tests.helpers.engines import run_inference
    from tests.helpers.forests import tree_rows

    config = PSRLConfig(attention_backend="triton")
    worker = make_worker(make_checkpoint(tmp_path, "qwen3"), psrl=config, dtype="float32")
    monkeypatch.setattr(KVCache, "lends_blocks", False)
    with pytest.raises(PlanError, match="the path cannot be read in place: the cache has no whole blocks"):
        run_inference(worker, tree_rows(), max_tokens=3)
