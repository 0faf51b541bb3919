"""``benchmarks/attention.py`` at toy size in Triton's interpreter: a cached path in its blocks, and gathered.

``tests/unit/test_triton_attention.py`` runs this file in a process with TRITON_INTERPRET=1.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from psrl.runtime.attention import AttentionLayout, attend_layout
from psrl.runtime.attention.cached_layer import CachedBlocks

REPOSITORY = Path(__file__).resolve().parents[2]
SCALE = 0.004
"""Of all lengths: ``responses`` has a path of 16 tokens in 4 blocks, and 8 responses of 8."""


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def test_the_report_has_the_path_in_place_beside_the_gathered_one(tmp_path, monkeypatch, capsys):
    import attention

    options = f"--device cpu --dtype float32 --scale {SCALE} --heads 4 2 --head-dim 32 16 --repeats 1"
    backends = "triton in_place gathered unshared dense"
    monkeypatch.setattr(sys, "argv", ["attention.py", *options.split(), "--workloads", "grpo", "responses",
                                      "--backends", *backends.split(), "--out", str(tmp_path / "x.json")])  # fmt: skip
    assert attention.main() == 0
    workloads = json.loads((tmp_path / "x.json").read_text())["workloads"]
    rows = workloads["responses"]["backends"]
    for name in ("triton", "in_place", "gathered", "dense"):
        assert rows[name]["visible_pairs"] == 64 * 16 + 8 * 36
        assert rows[name]["least_bytes"] == 4 * (64 * 4 * (32 + 16) + 80 * 2 * (32 + 16))
        assert rows[name]["forward_tflops"] > 0 and rows[name]["step_rate"] > 0
    assert rows["triton"]["saved_bytes"] == rows["gathered"]["saved_bytes"]
    # 16 path tokens of 2 heads, of 32 and 16 floats.
    assert rows["gathered"]["saved_bytes"] - rows["in_place"]["saved_bytes"] == 16 * 2 * (32 + 16) * 4
    for part in ("forward", "step"):
        wanted = rows["gathered"][f"{part}_ms"] / rows["in_place"][f"{part}_ms"]
        assert rows["in_place"][f"{part}_over_gathered"] == wanted
    assert {row.get("unsupported") for row in workloads["grpo"]["backends"].values()} == {
        None, "this forest has no cached path"
    }  # fmt: skip
    assert capsys.readouterr().out.count("in_place over gathered: forward") == 1


def test_both_ways_are_one_attention():
    """Equal bits, of outputs and of what is added to the accumulators; dense attention to 1e-5."""
    from attention_forests import Shape, responses

    work, shape = responses(SCALE), Shape(4, 2, 32, 16, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    layout = AttentionLayout.build(work.first_S, work.last_S, work.num_tokens)
    blocks = CachedBlocks.random(work.path_len, work.num_blocks, shape)
    assert [x.shape for x in blocks.k] == [(1, 4, 2, 32)] * 4 and blocks.dv[0].shape == (1, 4, 2, 16)
    *inputs, grad = shape.inputs(layout.num_queries, work.num_tokens)
    q, k, v = (x.requires_grad_() for x in inputs)
    results = []
    for attention in (blocks.in_place(layout), blocks.gathered(layout, "triton")):
        for x in (*blocks.dk, *blocks.dv):
            x.zero_()
        out = attention(q, k, v)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        dk, dv = (torch.cat([*(x[0] for x in path), x]) for path, x in ((blocks.dk, dk), (blocks.dv, dv)))
        results.append([out.detach(), dq, dk, dv])
    whole = [
        torch.cat([*(x[0] for x in path), x.detach()]).requires_grad_() for path, x in ((blocks.k, k), (blocks.v, v))
    ]
    wanted = attend_layout(q, *whole, layout, backend="reference")
    wanted = [wanted.detach(), *torch.autograd.grad(wanted, (q, *whole), grad)]
    for in_place, gathered, dense in zip(*results, wanted, strict=True):
        assert torch.equal(in_place, gathered)
        torch.testing.assert_close(in_place, dense, rtol=1e-5, atol=1e-5)


def test_a_trial_reads_the_path_where_the_model_would():
    """The same gradients from blocks in place and from a copy; ``sdpa`` only ever has the copy."""
    from psrl.runtime.attention.cached_layer import LayerShape
    from psrl.runtime.attention.trial import Fan, StandIn, run_trial

    shape, fan = LayerShape(4, 2, 16, 16, torch.float32, torch.device("cpu")), Fan(20, 0, 2, 7)
    stand_in = StandIn.make(fan, shape)
    steps = [stand_in.step("triton", True), stand_in.step("triton", False), stand_in.step("sdpa", False)]
    in_place, gathered, sdpa = (step() for step in steps)
    for one, other, tiles in zip(in_place, gathered, sdpa, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, tiles, rtol=1e-5, atol=1e-5)
    times = run_trial(("triton", "sdpa"), shape, in_place=True, fans=[fan], seconds_of=lambda run: 1.0)
    assert set(times.seconds) == {"triton", "sdpa"} and not times.refusals


def test_tiles_are_tuned_one_kernel_after_the_other(monkeypatch):
    """The fastest wins where it gains enough; what does not fit is left out; the default is back afterwards."""
    from triton.runtime.errors import OutOfResources

    from psrl.errors import UnsupportedError
    from psrl.runtime.attention.cached_layer import LayerShape
    from psrl.runtime.attention.trial import Fan, run_trial
    from psrl.runtime.attention.triton import backend, configs, tuning
    from psrl.runtime.attention.triton.configs import BlockSizes, KernelConfig

    shape, fans = LayerShape(2, 1, 16, 16, torch.float32, torch.device("cpu")), [Fan(9, 0, 2, 4), Fan(0, 3, 1, 2)]
    key = 16, 16, torch.float32
    default = configs.kernel_config(*key, 9)
    assert default == KernelConfig(BlockSizes(64, 32, 8, 1), BlockSizes(64, 32, 8, 1), BlockSizes(32, 64, 8, 1), "ieee")
    monkeypatch.setattr(backend, "kernel_config", configs.kernel_config)

    def seconds_of(run):
        tiles = configs.kernel_config(*key, 9)
        forward = {(32, 32, 4, 1): 0.3, (64, 16, 8, 1): 0.4}
        return 1.0 - forward.get(tuple(tiles.forward), 0.0) - {(64, 64, 8, 1): 0.005}.get(tuple(tiles.dq), 0.0)

    launches, too_large = backend.forward_launches, [BlockSizes(64, 16, 8, 1)]

    class DoesNotFit:
        __name__ = "forward_kernel"

        def __getitem__(self, grid):
            raise OutOfResources(300, 227, "shared memory")

    def limited_launches(*args):
        first, *others = launches(*args)
        return [first._replace(kernel=DoesNotFit()) if args[-1].forward in too_large else first, *others]

    monkeypatch.setattr(backend, "forward_launches", limited_launches)
    noted = []
    tuning_result = tuning.tune_tiles(shape, fans, seconds_of, noted.append)
    assert tuning_result.tiles == default._replace(forward=BlockSizes(32, 32, 4, 1))  # a gain of 0.5 % is none
    assert tuple(noted) == tuning_result.tried
    forward = [(tuple(x.blocks), x.seconds) for x in noted if x.kernel == "forward"]
    assert forward == [
        ((64, 32, 8, 1), 2.0), ((64, 32, 4, 1), 2.0), ((32, 32, 4, 1), 1.4), ((64, 16, 8, 1), None),
        ((64, 64, 8, 1), 2.0), ((64, 32, 8, 2), 2.0),
    ]  # fmt: skip
    assert all(x.seconds <= 1.4 for x in noted if x.kernel != "forward")  # measured with the better forward
    assert [x.kernel for x in noted] == ["forward"] * 6 + ["dq"] * 6 + ["dkv"] * 6
    assert configs.kernel_config(*key, 9) == default
    too_large.append(default.forward)
    with pytest.raises(
        UnsupportedError, match=r"forward_kernel does not fit this device .*shared memory, Required: 300"
    ):
        tuning.tune_tiles(shape, fans, seconds_of)
    assert configs.kernel_config(*key, 9) == default
    trial = run_trial(("triton", "sdpa"), shape, in_place=True, fans=fans, seconds_of=seconds_of)
    assert trial.seconds == {"sdpa": 2.0} and "forward_kernel does not fit" in trial.refusals["triton"]


def test_tuned_tiles_compute_the_same():
    from psrl.runtime.attention.cached_layer import LayerShape
    from psrl.runtime.attention.trial import Fan, StandIn
    from psrl.runtime.attention.triton import backend, configs
    from psrl.runtime.attention.triton.configs import BlockSizes, KernelConfig

    shape, fan = LayerShape(2, 1, 16, 16, torch.float32, torch.device("cpu")), Fan(20, 0, 2, 7)
    step = StandIn.make(fan, shape).step("triton", True)
    before = step()
    seen, read = [], backend.kernel_config
    configs.use_tiles(16, 16, torch.float32, tiles := KernelConfig(*[BlockSizes(16, 16, 4, 1)] * 3, "ieee"))
    try:
        backend.kernel_config = lambda *args: seen.append(configs.kernel_config(*args)) or seen[-1]
        after = step()
    finally:
        backend.kernel_config = read
        configs.use_tiles(16, 16, torch.float32, None)
    assert seen == [tiles]
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_psrl_tune(monkeypatch, tmp_path, capsys):
    """Tiles, then backends with these tiles; a job on such a device finds both."""
    from psrl.integrations.megatron.backend_choice import measured_choice
    from psrl.runtime.attention.trial import Fan
    from psrl.runtime.attention.triton import configs, tuning
    from psrl.tune.job import run_tune
    from psrl.tune.options import TuneOptions
    from psrl.tune.report import print_result, tile_line

    monkeypatch.setenv("PSRL_CACHE", str(tmp_path))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**sizes, "head_dim": 16, "intermediate_size": 32, "vocab_size": 9}))
    options, key = TuneOptions(str(config), "float32", 2, device="cpu"), (16, 16, torch.float32)
    noted = []

    def seconds_of(run):
        return 0.001 if configs.kernel_config(*key, 9).dkv.queries == 16 else 0.002

    result = run_tune(options, noted.append, fans=[Fan(3, 0, 2, 2)], seconds_of=seconds_of)
    configs.use_tiles(*key, None)
    assert result.shape[:4] == (2, 1, 16, 16) and result.tuning.tiles.dkv == (16, 64, 4, 1)
    # The trial of the backends ran these tiles too, which this clock likes whatever runs.
    text = "triton (auto, measured, sdpa takes 1.00x its time, flash cannot run; tuned tiles)"
    assert str(result.choice) == text
    assert tuning.remembered_tiles(result.shape) == result.tuning.tiles
    assert str(measured_choice(result.shape, True, result.tuning.tiles, seconds_of=None)) == text
    print_result(result)
    printed = capsys.readouterr().out
    assert "cpu: 2 heads on 1, of 16, float32" in printed and f"attention: {text}" in printed
    (row,) = [line for line in printed.splitlines() if "dkv" in line]
    assert row.split() == ["dkv", "16", "x", "64", "4,", "1", "2.00x"]
    assert tile_line(noted[0]) == "forward: 64 x 32, 8 warps, 1 stages: 2.000 ms"
