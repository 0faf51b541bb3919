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
    from psrl.runtime.attention.trial import Fan, run_trial, trial_step

    shape, fan = LayerShape(4, 2, 16, 16, torch.float32, torch.device("cpu")), Fan(20, 0, 2, 7)
    in_place, gathered, sdpa = (trial_step(*case)() for case in (
        ("triton", fan, shape, True), ("triton", fan, shape, False), ("sdpa", fan, shape, False)
    ))  # fmt: skip
    for one, other, tiles in zip(in_place, gathered, sdpa, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, tiles, rtol=1e-5, atol=1e-5)
    times = run_trial(("triton", "sdpa"), shape, in_place=True, fans=[fan])
    assert set(times.seconds) == {"triton", "sdpa"} and not times.refusals
