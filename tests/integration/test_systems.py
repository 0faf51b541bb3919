"""Comparison systems run in psrl's engine: the gradients of independent samples, and the bytes that were predicted."""

import functools

import pytest

from psrl.config import PSRLConfig
from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.verl.engine.config import PSRLEngineConfig
from psrl.systems import SYSTEMS
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS

LOSS = ppo_loss_fn(entropy_coeff=0.1)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", False)

    @functools.cache
    def make(system, recompute=None):
        psrl = PSRLConfig(enable=system != "unshared")
        name = "psrl" if system == "unshared" else system
        return make_worker(folder, psrl=psrl, sharing_system=name, recompute=recompute)

    return make


@pytest.fixture(scope="module")
def unshared(worker):
    @functools.cache
    def run(forest):
        return run_update(worker("unshared"), FORESTS[forest](), LOSS, max_tokens=1000, calculate_entropy=True)

    return run


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "psrl"])
def test_gradients_are_those_of_independent_samples(worker, unshared, system, forest):
    rows, wanted = FORESTS[forest](), unshared(forest)
    for max_tokens in (3, 20):
        outcome = run_update(worker(system), rows, LOSS, max_tokens=max_tokens, calculate_entropy=True)
        assert max(relative_errors(outcome.grads, wanted.grads).values()) <= 1e-9
        assert outcome.loss == pytest.approx(wanted.loss, rel=1e-9, abs=1e-9)
        assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    inference = run_inference(worker(system), rows, max_tokens=20, calculate_entropy=True)
    assert inference.report.kv_bytes_measured == inference.report.stats.kv_bytes_peak
    for kind, values in inference.model_output.items():
        for got, want in zip(values, wanted.model_output[kind], strict=True):
            assert got.numpy() == pytest.approx(want.numpy(), rel=1e-9, abs=1e-9)


def test_leaves_are_stored_once_under_recompute(worker, unshared):
    outcome = run_update(worker("radix", "full"), FORESTS["tree"](), LOSS, max_tokens=20, calculate_entropy=True)
    assert max(relative_errors(outcome.grads, unshared("tree").grads).values()) <= 1e-9
    assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak


def test_refusals():
    with pytest.raises(ConfigError, match=r"the sharing system must be one of psrl, .* got 'vllm'"):
        PSRLEngineConfig(dtype="float64", sharing_system="vllm")
    with pytest.raises(UnsupportedError, match="sharing_system=radix stores the K/V of leaf micro-batches"):
        PSRLEngineConfig(dtype="float64", sharing_system="radix", pipeline_model_parallel_size=2)
