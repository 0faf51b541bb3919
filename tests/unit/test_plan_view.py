"""``psrl plan``: the timeline is the plan's, the trace is well formed, and the page works in a real browser."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer.main
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.cost import KVFootprint, ModelShape
from psrl.plan_view.page import make_page
from psrl.plan_view.picture import make_picture, tree_runs
from psrl.plan_view.timeline import make_timeline
from psrl.plan_view.trace import make_trace
from psrl.planner import build_plan
from psrl.tiers import HostTier
from psrl.tree import build_tree
from psrl.types import SampleBatch

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10, grad_bytes_per_token=20)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def forked_batch() -> SampleBatch:
    """Ten tokens and a branch after the sixth."""
    return SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])


def plan_of(batch, max_tokens=4, **kwargs):
    return build_plan(batch, max_tokens=max_tokens, shape=SHAPE, footprint=kwargs.pop("footprint", FOOTPRINT), **kwargs)


# ---------------------------------------------------------------------------------------------------------- timeline
def test_bytes_over_time():
    plan = plan_of(forked_batch())
    first, second = (block.num_tokens for block in plan.blocks)
    timeline = make_timeline(plan, SHAPE, FOOTPRINT)
    assert [(e.micro_batch, e.backward) for e in timeline.executions] == [
        (0, False), (1, False), (2, True), (3, True), (1, True), (0, True),
    ]  # fmt: skip
    assert [e.kv_bytes for e in timeline.executions] == [10 * first, 60, 60, 60, 10 * first, 0]
    assert [e.grad_bytes for e in timeline.executions] == [0, 0, 120, 120, 120, 20 * first]
    assert [e.freed_kv for e in timeline.executions] == [(), (), (), (1,), (0,), ()]
    assert timeline.executions[-1].kv_bytes_after == timeline.executions[-1].grad_bytes_after == 0
    assert timeline.peak_bytes == plan.stats.kv_bytes_peak == 180
    assert first + second == 6


def test_durations_add_up_to_the_plans_flops():
    plan = plan_of(forked_batch())
    assert make_timeline(plan, SHAPE, FOOTPRINT).flops == pytest.approx(plan.stats.flops_shared, rel=1e-12)
    forward = plan_of(forked_batch(), forward_only=True)
    assert make_timeline(forward, SHAPE, FOOTPRINT).flops == pytest.approx(forward.stats.flops_shared, rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- trace
def test_trace_events():
    plan = plan_of(forked_batch())
    trace = make_trace(plan, make_timeline(plan, SHAPE, FOOTPRINT))
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "wave"]
    assert [(e["name"], e["tid"]) for e in slices] == [
        ("spine 0", 1), ("spine 1", 1), ("leaf 2", 2), ("leaf 3", 2), ("spine 1", 2), ("spine 0", 2),
    ]  # fmt: skip
    for before, after in pairwise(slices):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    assert sum(e["args"]["flops"] for e in slices) == pytest.approx(plan.stats.flops_shared)
    assert sum(e["dur"] for e in slices) == pytest.approx(plan.stats.flops_shared / 1e9)
    cache = [(e["name"], e["args"]["blocks"]) for e in events if e["ph"] == "i"]
    assert cache == [
        ("write", [0]),
        ("read", [0]), ("write", [1]),
        ("read", [0, 1]), ("new gradients", [0, 1]),
        ("read", [0, 1]), ("free K/V", [1]),
        ("read", [0]), ("free K/V", [0]), ("free gradients", [1]),
        ("free gradients", [0]),
    ]  # fmt: skip
    counters = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(counters) == plan.stats.kv_bytes_peak and counters[-1] == 0
    assert trace["otherData"]["kv_bytes_peak"] == 180
    flows = [(e["ph"], e["id"], e["name"]) for e in events if e["ph"] in "sf"]
    assert len(flows) == 2 * sum(block.ref_count for block in plan.blocks)
    spans = {tid: [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid] for tid in (1, 2)}
    for event in (e for e in events if e["ph"] in "sf"):  # a viewer ties an end to the slice that it lies in
        assert any(begin < event["ts"] < end for begin, end in spans[event["tid"]])


def test_waves_are_slices():
    rows = [[1] * 6 + [2 + b // 8] * 6 + [4 + b // 4] * 6 + [8 + b // 2] * 6 + [16 + b] * 6 for b in range(16)]
    batch = SampleBatch.from_lists(rows, [[0] + [1] * 29] * 16)
    footprint = KVFootprint(10, 20, 24 * 30)
    plan = plan_of(batch, 7, footprint=footprint)
    timeline = make_timeline(plan, SHAPE, footprint)
    assert timeline.peak_bytes == plan.stats.kv_bytes_peak <= 24 * 30
    waves = [e for e in make_trace(plan, timeline)["traceEvents"] if e.get("cat") == "wave"]
    assert len(waves) == plan.stats.num_waves > 1
    assert sum(e["dur"] for e in waves) == pytest.approx(timeline.flops / 1e9)


def test_transfers_have_a_track():
    batch, limit = forked_batch(), KVFootprint(10, 20, 70)
    plan = plan_of(batch, footprint=limit, host=HostTier(1 << 20, 2))
    timeline = make_timeline(plan, SHAPE, limit)
    assert timeline.peak_bytes == plan.stats.kv_bytes_peak <= 70 and plan.stats.kv_bytes_to_host > 0
    events = make_trace(plan, timeline)["traceEvents"]
    (track,) = [e["tid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "transfers with the host"]
    moved = [e for e in events if e.get("cat") == "transfer"]
    assert {e["tid"] for e in moved} == {track}
    for name, total in (("to host", plan.stats.kv_bytes_to_host), ("to device", plan.stats.kv_bytes_to_device)):
        assert sum(e["args"]["bytes"] for e in moved if e["name"] == name) == total
    assert max(e["args"]["copies"] for e in events if e["name"] == "host bytes") <= plan.stats.kv_host_bytes_peak


# ------------------------------------------------------------------------------------------------------------ picture
def test_runs_cover_the_tree():
    batch = forked_batch()
    plan = plan_of(batch)
    cut = plan.blocks[0].num_tokens
    runs = tree_runs(plan, build_tree(batch))
    columns = list(zip(*(runs[key] for key in ("x", "tokens", "y", "height", "micro_batch")), strict=True))
    assert columns == [(0, cut, 0, 2, 0), (cut, 6 - cut, 0, 2, 1), (6, 4, 0, 1, 2), (6, 1, 1, 1, 3)]
    assert runs["text"] == [""] * 4


def test_runs_cover_a_deep_tree_without_overlap():
    rows = [[1] * 6 + [2 + b // 8] * 6 + [4 + b // 4] * 6 + [8 + b // 2] * 6 + [16 + b] * 6 for b in range(16)]
    batch = SampleBatch.from_lists(rows, [[0] + [1] * 29] * 16)
    plan = plan_of(batch, 7)
    runs = tree_runs(plan, build_tree(batch))
    painted = np.zeros((16, 30), dtype=int)
    for x, tokens, y, height in zip(*(runs[key] for key in ("x", "tokens", "y", "height")), strict=True):
        painted[y : y + height, x : x + tokens] += 1
    assert (painted == 1).all()
    assert sum(runs["tokens"]) == plan.stats.unique_tokens


def test_texts_are_data():
    """Text of a trace cannot end the page's script, whatever it says."""
    batch = SampleBatch.from_lists([[1, 2, 3]], [[0, 1, 1]])
    plan = plan_of(batch)
    timeline = make_timeline(plan, SHAPE, FOOTPRINT)
    picture = make_picture(plan, build_tree(batch), timeline, lambda ids: "</script><script>alert(1)</script>\n\x00")
    page = make_page("</title><b>", picture)
    assert page.count("<script") == page.count("</script>") == 2 and "</title><b>" not in page
    data = page.split('id="plan">')[1].split("</script>")[0]
    assert json.loads(data)["runs"]["text"] == ["</script><script>alert(1)</script>\\n\\x00"]


# -------------------------------------------------------------------------------------------------------- the command
@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two trials of a task, step-wise, that part after the first turn."""
    rows = []
    for trial, moves in enumerate((["go north", "take the key"], ["go north", "open the door", "go east"])):
        messages = [{"role": "system", "content": "You play a text game."}]
        for number, move in enumerate(moves):
            messages.append({"role": "user", "content": f"Turn {number}: you are in a room with a table and a shelf."})
            messages.append({"role": "assistant", "content": move})
        rows.append({"task": "t", "trial": trial, "messages": messages})
    path = tmp_path / "game.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def psrl(*args: object):
    result = CliRunner().invoke(app, ["plan", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


def test_the_command_writes_all_three(trace_file: Path, tmp_path: Path):
    trace, page, figures = (tmp_path / name for name in ("t.json", "p.html", "f.json"))
    out = psrl(trace_file, "--max-tokens", 64, "--trace", trace, "--html", page, "--json", figures)
    record = json.loads(figures.read_text())
    assert "samples" in out and f"{record['kv_bytes_peak']:,}" in out
    assert max(e["kv_bytes"] + e["grad_bytes"] for e in record["timeline"]) == record["kv_bytes_peak"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == record["kv_bytes_peak"]
    text = page.read_text()
    assert not any(word in text for word in ("http://", "https://", "src=", "@import", "url("))


def test_public_options_are_these():
    params = typer.main.get_command(app).commands["plan"].params  # type: ignore[attr-defined]
    assert sorted(name for param in params for name in (param.opts or [param.name]) if name != "--help") == [
        "--dtype", "--forward-only", "--html", "--json", "--kv-cache-bytes", "--kv-host-bytes", "--kv-recompute",
        "--limit",
        "--max-tokens", "--mode", "--shape", "--tokenizer", "--trace", "files",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--kv-cache-bytes", "0"], "--kv-cache-bytes must be at least 1, got 0"),
        (["--kv-host-bytes", "0"], "--kv-host-bytes must be at least 1, got 0"),
        (["--mode", "turn"], "--mode must be one of step, trajectory, got 'turn'"),
        (["--shape", "gpt-2"], "--shape gpt-2: cannot read gpt-2/config.json"),
    ],
)
def test_bad_option(trace_file: Path, args: list[str], message: str):
    result = CliRunner().invoke(app, ["plan", str(trace_file), *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"psrl: error: {message}") and result.stderr.count("\n") == 1


def test_it_needs_no_torch(trace_file: Path, tmp_path: Path):
    code = (
        "import sys\nfrom psrl.cli.main import app\n"
        f"try:\n    app(['plan', {str(trace_file)!r}, '--html', {str(tmp_path / 'p.html')!r}])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'verl', 'megatron', 'matplotlib'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_budget_that_is_too_small_is_one_line(trace_file: Path):
    command = ["plan", str(trace_file), "--max-tokens", "16", "--kv-cache-bytes", "1000"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "psrl.kv_cache_bytes allows 1,000" in result.stderr and result.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------------- the browser
@pytest.fixture(scope="module")
def browser():
    """Headless Chromium of the system; playwright is only its driver."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


def opened(browser, path: Path):
    """The page and what it complained of or asked the network for."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    return page, troubles


COLORS_JS = """id => {
  const canvas = document.getElementById(id), seen = new Set();
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] === 255) seen.add(pixels.slice(i, i + 3).join());
  return [...seen];
}"""


def test_the_plan_page_in_a_browser(browser, trace_file: Path, tmp_path: Path):
    html, figures = tmp_path / "p.html", tmp_path / "f.json"
    psrl(trace_file, "--max-tokens", 64, "--html", html, "--json", figures)
    record = json.loads(figures.read_text())
    page, troubles = opened(browser, html)
    drawn = page.evaluate("window.psrlPlan")
    assert drawn["peakBytes"] == record["kv_bytes_peak"]
    assert page.inner_text("#peak") == f"{record['kv_bytes_peak']:,}"
    assert drawn["executions"] == len(record["timeline"])
    assert len(page.evaluate(COLORS_JS, "tree")) >= record["num_micro_batches"]
    assert len(page.evaluate(COLORS_JS, "time")) >= record["num_micro_batches"]
    assert {"37,99,235", "217,119,6"} <= set(page.evaluate(COLORS_JS, "bytes"))

    page.hover("#tree", position={"x": 8, "y": 200})
    tip = page.inner_text("#tip")
    assert tip.startswith("Spine micro-batch 0: ") and "<|im_start|>system" in tip
    page.hover("#time", position={"x": 8, "y": 20})
    assert "Pass 1, wave 0" in page.inner_text("#tip")
    before = page.evaluate(COLORS_JS, "tree")
    page.click("#tree", position={"x": 8, "y": 200})
    assert page.evaluate(COLORS_JS, "tree") != before  # the others fade
    page.click("#tree", position={"x": 8, "y": 200})
    assert page.evaluate(COLORS_JS, "tree") == before
    assert troubles == []
    page.close()


def test_the_analysis_page_in_a_browser(browser, trace_file: Path, tmp_path: Path):
    html = tmp_path / "a.html"
    result = CliRunner().invoke(app, ["analyze", str(trace_file), "--html", str(html)])
    assert result.exit_code == 0, result.output
    page, troubles = opened(browser, html)
    assert page.locator("svg").count() == 4 and page.locator("svg circle").count() == 5 * (2 + 3 + 2)
    assert page.locator("h2").first.inner_text() == "What it is worth"
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0  # nothing is cut off at the side
    assert troubles == []
    page.close()
