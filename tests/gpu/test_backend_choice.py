"""``psrl.attention_backend=auto`` and ``psrl tune`` on a CUDA device. Which kernel wins is asserted nowhere."""

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.integrations.megatron import backend_choice
from psrl.integrations.megatron.backend_choice import choose_backend
from psrl.runtime.attention import KEEPING_BACKENDS
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.trial import FANS, Fan, StandIn, run_trial
from tests.helpers import make_checkpoint, make_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer(**changes):
    return LayerShape(8, 2, 128, 128, torch.bfloat16, torch.device("cuda", 0))._replace(**changes)


@pytest.mark.parametrize("in_place", [False, True])
def test_every_candidate_is_measured_and_nothing_stays(in_place):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    numbers = torch.cuda.get_rng_state()
    times = run_trial(KEEPING_BACKENDS, layer(), in_place=in_place)
    assert set(times.seconds) == set(KEEPING_BACKENDS) and not times.refusals
    assert all(0 < seconds < 10 for seconds in times.seconds.values())
    assert torch.cuda.memory_allocated() <= before[0] and torch.cuda.memory_reserved() <= before[1]
    assert torch.equal(torch.cuda.get_rng_state(), numbers)


@pytest.mark.parametrize("fan", FANS, ids=["local", "path"])
def test_candidates_compute_the_same(fan):
    stand_in = StandIn.make(fan, layer())
    wanted = stand_in.step("triton", in_place=False)()
    for step in (stand_in.step("triton", in_place=True), stand_in.step("flash", False), stand_in.step("sdpa", False)):
        for got, want in zip(step(), wanted, strict=True):
            assert float((got - want).float().norm() / want.float().norm()) <= 2e-2


def test_an_engine_measures_once(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(backend_choice, "run_trial", lambda *a, **k: runs.append(a) or run_trial(*a, **k))
    checkpoint = make_checkpoint(tmp_path, "qwen2", head_dim=64)
    choices = [make_worker(checkpoint, psrl=PSRLConfig(), dtype="bfloat16").engine.attention_choice for _ in range(2)]
    assert choices[0] == choices[1] and choices[0].name in KEEPING_BACKENDS
    assert choices[0].detail.startswith("auto, measured, ") and len(runs) == 1


def test_float32_runs_on_what_takes_it():
    choice = choose_backend("auto", layer(dtype=torch.float32), in_place=True)
    assert str(choice) == "triton (auto, measured, flash cannot run, sdpa cannot run)"


def test_tiles_are_tuned(tmp_path, monkeypatch):
    from psrl.runtime.attention.triton.tuning import remember_tiles, remembered_tiles, tune_tiles

    monkeypatch.setenv("PSRL_CACHE", str(tmp_path))
    shape = layer(head_dim=64, v_head_dim=64)
    tuning = tune_tiles(shape, [Fan(256, 64, 2, 64)])
    assert {x.kernel for x in tuning.tried if x.seconds is not None} == {"forward", "dq", "dkv"}
    assert remembered_tiles(shape) is None
    remember_tiles(shape, tuning.tiles)
    assert remembered_tiles(shape) == tuning.tiles
