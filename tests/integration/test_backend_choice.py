"""``psrl.attention_backend=auto`` on a GPU: measured once, remembered, and the same on all ranks.

What is measured here runs on the CPU; which backend wins there is a matter of the machine and asserted nowhere.
"""

import json
import logging
from dataclasses import replace

import pytest
import torch

from psrl.cost import LatentShape, ModelShape
from psrl.errors import ConfigError, InputError, RankError, UnsupportedError
from psrl.integrations.megatron import backend_choice
from psrl.integrations.megatron.backend_choice import (
    BackendChoice,
    agreed_choice,
    choice_of,
    choose_backend,
    measured_choice,
)
from psrl.runtime.attention import records, trial
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.trial import Fan, StandIn, TrialTimes, run_trial
from psrl.runtime.attention.triton import tuning
from psrl.runtime.attention.triton.configs import BlockSizes, KernelConfig, kernel_config, use_tiles
from psrl.tune.job import layer_shape, run_tune
from psrl.tune.options import TuneOptions
from tests.helpers.ranks import RankPool

CPU = torch.device("cpu")
SHAPE = LayerShape(4, 2, 16, 16, torch.float32, CPU)
FANS = (Fan(path=0, trunk=12, num_branches=3, branch=5), Fan(path=20, trunk=0, num_branches=2, branch=7))
CANDIDATES = ("triton", "flash", "sdpa")
TILES = KernelConfig(BlockSizes(16, 32, 4, 1), BlockSizes(32, 16, 4, 2), BlockSizes(64, 64, 8, 3), "ieee")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attention"


@pytest.fixture
def tiles():
    yield TILES
    use_tiles(16, 16, torch.float32, None)


def times(**seconds):
    return TrialTimes(seconds, {name: "not here" for name in CANDIDATES if name not in seconds})


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (times(triton=1.0, flash=2.0, sdpa=3.5),
         "triton (auto, measured, flash takes 2.00x its time, sdpa takes 3.50x its time)"),
        (times(triton=2.0, flash=1.0), "flash (auto, measured, triton takes 2.00x its time, sdpa cannot run)"),
        # Within five per cent it is the one that copies nothing.
        (times(triton=1.04, flash=1.0), "triton (auto, measured, flash takes 0.96x its time, sdpa cannot run)"),
        (times(triton=1.06, flash=1.0), "flash (auto, measured, triton takes 1.06x its time, sdpa cannot run)"),
        (times(sdpa=9.0), "sdpa (auto, measured, triton cannot run, flash cannot run)"),
    ],
)  # fmt: skip
def test_the_fastest_is_chosen(measured, says):
    assert str(choice_of(measured, CANDIDATES)) == says


def test_a_model_that_nothing_runs_is_refused():
    with pytest.raises(UnsupportedError, match="no attention backend runs this model here: triton: not here; flash: "):
        choice_of(times(), CANDIDATES)


def test_what_is_not_auto_on_cuda_is_not_measured(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("measured")

    monkeypatch.setattr(backend_choice, "run_trial", never)
    monkeypatch.setattr(records, "device_name", lambda device: "GPU sm_90")
    on_gpu = SHAPE._replace(device=torch.device("cuda"))
    assert str(choose_backend("auto", SHAPE, in_place=True)) == "sdpa (auto)"
    assert str(choose_backend("flex", on_gpu, in_place=True)) == "flex"
    with pytest.raises(ConfigError, match=r"psrl\.attention_backend must be one of auto, "):
        choose_backend("fast", on_gpu, in_place=True)


def test_backends_take_turns_and_medians_are_added():
    asked = []

    def seconds_of(run):
        run()
        asked.append(run)
        return [9.0, 1.0, 2.0, 3.0, 0.0][(len(asked) - 1) // 2 % 5] + 10.0 * ((len(asked) - 1) % 2)

    got = run_trial(("reference", "sdpa", "triton"), SHAPE, in_place=False, fans=FANS, seconds_of=seconds_of)
    assert got.seconds == {"reference": 2.0 + 2.0, "sdpa": 12.0 + 12.0}
    assert list(got.refusals) == ["triton"] and "runs on cuda" in got.refusals["triton"]
    assert len(asked) == 2 * 2 * 5 and asked[0] is asked[2] is not asked[1]


def test_backends_compute_the_same_attention_of_a_stand_in():
    """What is timed is attention under the fan's mask, forward and backward, by every backend alike."""
    for fan in FANS:
        dense, tiles = (StandIn.make(fan, SHAPE).step(name, False)() for name in ("reference", "sdpa"))
        assert [x.shape for x in dense] == [(fan.num_local, 4, 16), *[(fan.num_local, 2, 16)] * 2]
        for x, y in zip(dense, tiles, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    # Two branches of 7 on a path of 20: each sees the path and itself.
    assert FANS[1].layout().visible_pairs == 14 * 20 + 2 * (7 * 8 // 2)
    assert FANS[0].layout().visible_pairs == 12 * 13 // 2 + 15 * 12 + 3 * (5 * 6 // 2)


def test_a_refusal_on_a_later_stand_in_leaves_a_backend_out(monkeypatch):
    attend = trial.attend_layout

    def refusing(q, k, v, layout, backend):
        if backend == "reference" and layout.num_keys > layout.num_queries:
            raise UnsupportedError("no paths")
        return attend(q, k, v, layout, backend=backend)

    monkeypatch.setattr(trial, "attend_layout", refusing)
    monkeypatch.setattr("psrl.runtime.attention.cached_layer.attend_layout", refusing)
    got = run_trial(("reference", "sdpa"), SHAPE, in_place=False, fans=FANS, seconds_of=lambda run: 3.0)
    assert got == TrialTimes({"sdpa": 6.0}, {"reference": "no paths"})


def test_a_backend_that_breaks_is_named(monkeypatch):
    """It is no refusal: what fails once for another reason is not remembered as what cannot run."""

    def broken(*args, backend, **kwargs):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(trial, "attend_layout", broken)
    wanted = (
        r"backend 'sdpa' failed while auto was measured \(RuntimeError: CUDA out of memory\): set psrl\.attention_b"
    )
    with pytest.raises(UnsupportedError, match=wanted):
        measured_choice(SHAPE, False, None, ("sdpa",), fans=FANS)
    assert not records.records_folder().exists()


def test_a_trial_leaves_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_trial(("sdpa",), SHAPE, in_place=False, fans=FANS)
    assert torch.equal(torch.get_rng_state(), before)


def measured(monkeypatch, seconds, tiles=None, **changes):
    """The choice as text, and how often it was measured."""
    runs = []
    monkeypatch.setattr(backend_choice, "run_trial", lambda *args, **kwargs: runs.append(args) or seconds)
    choice = measured_choice(SHAPE._replace(**changes), False, tiles, CANDIDATES)
    return str(choice).replace("auto, measured, ", ""), len(runs)


def test_a_measurement_is_remembered_for_its_kind(monkeypatch, cache):
    took_thrice = "sdpa (triton takes 3.00x its time, flash cannot run)"
    assert measured(monkeypatch, times(triton=3.0, sdpa=1.0)) == (took_thrice, 1)
    (file,) = cache.iterdir()
    assert file.name == "backends-cpu-float32-16-16-4-2-gathered.json"
    assert measured(monkeypatch, times(triton=1.0)) == (took_thrice, 0)
    triton_only = "triton (flash cannot run, sdpa cannot run)"
    assert measured(monkeypatch, times(triton=1.0), num_heads=8) == (triton_only, 1)
    record = json.loads(file.read_text())
    assert record["kind"]["with"]["torch"] == torch.__version__
    record["kind"]["with"]["torch"] = "1.0"
    file.write_text(json.dumps(record))
    flash_only = "flash (triton cannot run, sdpa cannot run)"
    assert measured(monkeypatch, times(flash=1.0)) == (flash_only, 1)
    assert measured(monkeypatch, times(triton=1.0)) == (flash_only, 0)


def test_other_tiles_are_measured_anew(monkeypatch, tiles):
    flash_wins = times(triton=2.0, flash=1.0)
    assert measured(monkeypatch, flash_wins)[1] == 1
    text = "triton (flash takes 2.00x its time, sdpa cannot run; tuned tiles)"
    assert measured(monkeypatch, times(triton=1.0, flash=2.0), tiles) == (text, 1)
    assert measured(monkeypatch, flash_wins, tiles) == (text, 0)
    assert kernel_config(16, 16, torch.float32, 9) == tiles  # what the trial ran


@pytest.mark.parametrize("values", [1, [], {}, {"seconds": {"sdpa": 1.0}, "refusals": {}},
    {"seconds": {"sdpa": "1", "flash": 1.0}, "refusals": {"triton": ""}},
    {"seconds": {"sdpa": 0.0}, "refusals": {"triton": "", "flash": ""}},
])  # fmt: skip
def test_a_record_of_another_shape_is_measured_again(monkeypatch, cache, caplog, values):
    measured(monkeypatch, times(sdpa=1.0))
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "values": values}))
    with caplog.at_level(logging.WARNING):
        assert measured(monkeypatch, times(flash=1.0))[1] == 1
    assert f"{file} is no measurement of attention" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"values": 1}', "", "null"])
def test_a_broken_record_is_measured_again_and_said(monkeypatch, cache, caplog, text):
    measured(monkeypatch, times(sdpa=1.0))
    (file,) = cache.iterdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert measured(monkeypatch, times(flash=1.0))[1] == 1
    assert f"{file} is no measurement of attention" in caplog.text
    assert json.loads(file.read_text())["values"]["seconds"] == {"flash": 1.0}


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert measured(monkeypatch, times(sdpa=1.0))[1] == 1
    assert "it is measured at every start; set PSRL_CACHE" in caplog.text
    # A job's other engines run the same.
    assert measured(monkeypatch, times(flash=1.0)) == ("sdpa (triton cannot run, flash cannot run)", 0)


def test_the_layer_of_a_rank():
    model = ModelShape(2, 64, num_heads=8, num_kv_heads=1, head_dim=32, ffn_size=64, output_size=9)
    assert LayerShape.of_model(model, 2, torch.bfloat16, CPU) == (4, 1, 32, 32, torch.bfloat16, CPU)
    latent = replace(model, latent=LatentShape(0, 512, plain_dim=48, rotary_dim=16, value_dim=40))
    assert LayerShape.of_model(latent, 2, torch.bfloat16, CPU) == (4, 4, 64, 40, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel": 0}, "--tp must be at least 1, got 0"),
        ({"tensor_parallel": 5}, "--tp 5 does not divide 12 heads on 2 key/value heads"),
        ({"tensor_parallel": 3}, "--tp 3 does not divide 12 heads on 2 key/value heads"),
        ({"dtype": "int8"}, "--dtype must be one of bfloat16, float16, float32, got 'int8'"),
    ],
)
def test_what_tune_refuses(options, says):
    with pytest.raises(ConfigError, match=says):
        layer_shape(TuneOptions("qwen2.5-1.5b", device="cpu", **options))


def test_tune_has_to_keep_its_result(monkeypatch, tmp_path):
    """Before it measures for minutes."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"file/attention: cannot make the folder \(Not a directory\): set PSRL_CACHE"):
        run_tune(TuneOptions("qwen2.5-1.5b", device="cpu"), lambda tried: None)


def test_the_layer_that_is_tuned():
    shape, is_latent = layer_shape(TuneOptions("qwen2.5-1.5b", tensor_parallel=4, device="cpu"))
    assert (shape, is_latent) == (LayerShape(3, 1, 128, 128, torch.bfloat16, CPU), False)


def test_tiles_survive_the_record(monkeypatch, tiles, cache):
    assert tuning.remembered_tiles(SHAPE) is None
    tuning.remember_tiles(SHAPE, tiles)
    assert [file.name for file in cache.iterdir()] == ["tiles-cpu-float32-16-16.json"]
    assert tuning.remembered_tiles(SHAPE) == tiles
    assert tuning.remembered_tiles(SHAPE._replace(num_heads=32)) == tiles  # keyed on head dims and dtype only
    assert tuning.remembered_tiles(SHAPE._replace(head_dim=32)) is None
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    for broken in ([1, 2], [*record["values"]["tiles"][:3], "fp8"], [[0, 1, 2, 3]] * 3 + ["ieee"], None):
        file.write_text(json.dumps({**record, "values": {"tiles": broken}}))
        assert tuning.remembered_tiles(SHAPE) is None
    file.write_text(json.dumps(record))
    assert tuning.remembered_tiles(SHAPE) == tiles
    monkeypatch.setattr(torch, "__version__", "99")
    assert tuning.remembered_tiles(SHAPE) is None


def _choice_on_rank(fails: bool, unexpected: Exception | None = None) -> str:
    rank = torch.distributed.get_rank()

    def measure() -> BackendChoice:
        assert rank == 0, "only rank 0 measures"
        if unexpected is not None:
            raise unexpected
        choice = choice_of(TrialTimes({}, {"triton": "no GPU"}) if fails else times(triton=1.0), CANDIDATES)
        return choice._replace(tiles=TILES)

    try:
        choice = agreed_choice(measure, SHAPE)
        assert kernel_config(16, 16, torch.float32, 9) == TILES
        return str(choice)
    except (UnsupportedError, RankError, OSError) as error:
        return f"raised {error}"


def test_ranks_agree(tmp_path):
    pool = RankPool(2, tmp_path)
    try:
        assert (
            pool.run(_choice_on_rank, False)
            == ["triton (auto, measured, flash cannot run, sdpa cannot run; tuned tiles)"] * 2
        )
        wanted = "raised no attention backend runs this model here: triton: no GPU"
        assert pool.run(_choice_on_rank, True) == [wanted] * 2
        # No rank waits for one that has failed.
        says = "raised rank 0 failed while it chose the attention backend: OSError('no disk')"
        assert pool.run(_choice_on_rank, False, OSError("no disk")) == ["raised no disk", says]
    finally:
        pool.close()
