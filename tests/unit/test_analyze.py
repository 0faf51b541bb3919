"""``psrl analyze``: exact counts, predictions that are the planner's own, and what breaks sharing."""

import dataclasses
import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from psrl.analyze.analysis import analyze
from psrl.analyze.measures import plan_batch, spine_tokens, total_work, tree_packing, unique_within
from psrl.analyze.options import AnalyzeOptions
from psrl.analyze.predict import BudgetFigures, best_budget
from psrl.analyze.radix import TreeShape
from psrl.analyze.shapes import load_shape
from psrl.analyze.streams import Stream, cut, positions_of, read_streams, tokens_of
from psrl.cli.main import app
from psrl.cost import KVFootprint, LatentShape, ModelShape
from psrl.data import load_samples, load_tokenizer
from psrl.errors import ConfigError, InputError
from psrl.plan_check import check_plan
from psrl.planner import build_plan
from psrl.types import SampleBatch
from tests.helpers.streams import stream, tree_of

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10, grad_bytes_per_token=20)
SHARED = Path(os.environ.get("PSRL_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@st.composite
def forests(draw):
    """Rows that extend, repeat or branch off earlier ones, with any positions now and then."""
    rows, masks, positions = [], [], []
    for _ in range(draw(st.integers(1, 9))):
        source = draw(st.integers(0, len(rows) - 1)) if rows and draw(st.booleans()) else None
        kept = draw(st.integers(0, len(rows[source]))) if source is not None else 0
        row = rows[source][:kept] if source is not None else []
        place = positions[source][:kept] if source is not None else []
        more = draw(st.lists(st.integers(0, 3), min_size=0 if row else 1, max_size=12))
        shift = draw(st.sampled_from([0, 0, 0, 5]))
        rows.append([*row, *more])
        positions.append([*place, *range(len(row) + shift, len(row) + shift + len(more))])
        masks.append([0, *draw(st.lists(st.integers(0, 1), min_size=len(rows[-1]) - 1, max_size=len(rows[-1]) - 1))])
    return SampleBatch.from_lists(rows, masks, position_ids=positions)


def streams_of(batch: SampleBatch) -> list[Stream]:
    out = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids, mask, positions = (x[start:end] for x in (batch.token_ids_N, batch.target_mask_N, batch.position_ids_N))
        out.append(stream(ids, mask, positions=positions))
    return out


# ------------------------------------------------------------------------------------------------------------ counts
@settings(max_examples=100, deadline=None)
@given(forests(), st.sampled_from([1, 2, 3, 5, 8, 1000]))
def test_predictions_are_those_of_the_full_batch(batch, max_tokens):
    """The plan of the tree's leaves alone is the plan of all samples, to the last block."""
    tree = tree_of(*streams_of(batch))
    shape = TreeShape.of(tree)
    whole = build_plan(batch, max_tokens=max_tokens, shape=SHAPE, footprint=FOOTPRINT)
    reduced = plan_batch(tree, shape)
    plan = build_plan(reduced, max_tokens=max_tokens, shape=SHAPE, footprint=FOOTPRINT)
    check_plan(plan, reduced, FOOTPRINT)
    assert shape.num_tokens == whole.stats.unique_tokens == plan.stats.unique_tokens
    assert spine_tokens(shape, max_tokens) == whole.stats.spine_tokens == plan.stats.spine_tokens
    assert plan.waves == whole.waves and plan.blocks == whole.blocks
    assert plan.stats.kv_bytes_peak == whole.stats.kv_bytes_peak
    assert plan.stats.flops_shared == whole.stats.flops_shared
    assert plan.edges.num_edges == whole.edges.num_edges
    every = total_work(tree)
    assert SHAPE.forward_flops(every) + SHAPE.backward_flops(every) == whole.stats.flops_unshared
    for sample, node in enumerate(tree.samples.node):
        start, end = batch.cu_seqlens[sample : sample + 2]
        assert tokens_of(tree.path_keys(node)).tolist() == batch.token_ids_N[start:end].tolist()
        assert positions_of(tree.path_keys(node)).tolist() == batch.position_ids_N[start:end].tolist()


def trie_size(rows: list[tuple[int, ...]]) -> int:
    return len({row[: i + 1] for row in rows for i in range(len(row))})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=9))
def test_tree_packing_with_room_for_all_is_the_tree(rows):
    tree = tree_of(*(stream(row) for row in rows))
    shape, lengths = TreeShape.of(tree), np.asarray([len(row) for row in rows])
    packing = tree_packing(shape, lengths, 1000)
    assert (packing.work.tokens, packing.num_micro_batches) == (trie_size(rows), 1)
    assert packing.work.pairs == sum(len(p) for p in {row[: i + 1] for row in rows for i in range(len(row))})
    for budget in (1, 3, 5, 8):
        packing = tree_packing(shape, lengths, budget)
        assert trie_size(rows) <= packing.work.tokens <= int(lengths.sum())
        assert packing.largest <= max(budget, int(lengths.max()))


def test_tree_packing_cuts_a_group():
    """Four branches of 4 + 3 tokens: a budget of 10 holds two of them, one of 7 holds one, one of 6 not even that."""
    tree = tree_of(*(stream([1, 2, 3, 4, b, b, b]) for b in (5, 6, 7, 8)))
    shape, lengths = TreeShape.of(tree), np.full(4, 7)

    def figures(budget):
        packing = tree_packing(shape, lengths, budget)
        return packing.work.tokens, packing.num_micro_batches, packing.largest

    assert [figures(b) for b in (16, 10, 7, 6)] == [(16, 1, 16), (20, 2, 10), (28, 4, 7), (28, 4, 7)]
    assert spine_tokens(shape, 10) == 4 and spine_tokens(shape, 15) == 1 and spine_tokens(shape, 16) == 0


def test_match_rates_by_scope():
    """Two prompts with one system prompt of 4 tokens; the first has two trajectories, one of them in two steps."""
    tree = tree_of(
        stream([1, 1, 1, 1, 2, 3, 4, 5], ends=[6, 8], uid="a", session="a0"),
        stream([1, 1, 1, 1, 2, 6], uid="a", session="a1"),
        stream([1, 1, 1, 1, 9], uid="b", session="b0"),
    )
    assert sum(tree.samples.length) == 25
    assert unique_within(tree, [0] * 4) == 10
    assert unique_within(tree, tree.samples.uid) == 9 + 5
    assert unique_within(tree, tree.samples.session) == 8 + 6 + 5
    assert unique_within(tree, range(4)) == 25


def test_samples_without_labels_share_with_nobody_in_their_scope():
    tree = tree_of(stream([1, 2]), stream([1, 2]))
    assert unique_within(tree, tree.samples.session) == unique_within(tree, tree.samples.uid) == 4


def test_mini_batches_cut_a_stream_between_steps():
    steps = stream(range(9), [0, 1, 1] * 3, ends=[3, 6, 9], begins=[1, 4, 7], session="s")
    parts = [(part.ends, part.mask_N.tolist(), part.first_index, last) for part, last in cut([steps], 2)]
    assert parts == [
        ((3, 6), [False, True, True] * 2, 0, True),
        ((9,), [False] * 7 + [True] * 2, 2, False),
    ]
    assert [last for _, last in cut([steps, steps], 3)] == [True, True]
    assert [part.num_samples for part, _ in cut([steps], None)] == [3]


# ----------------------------------------------------------------------------------------------------------- reading
CHAT = [
    {"role": "system", "content": "You play."},
    {"role": "user", "content": "A room."},
    {"role": "assistant", "content": "go"},
    {"role": "user", "content": "A hall."},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "look ü"},
    {"role": "user", "content": "The end."},
]


@pytest.mark.parametrize("mode", ["step", "trajectory"])
@pytest.mark.parametrize("template", ["chatml", "raw"])
def test_streams_are_the_samples_of_the_loader(tmp_path: Path, mode: str, template: str):
    path = tmp_path / "c.jsonl"
    rows = [{"task": "t", "trial": i, "messages": CHAT[: 7 - i], "template": template} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_samples([path], tokenizer=lambda: load_tokenizer(None), mode=mode)
    tree = tree_of(*read_streams([path], tokenizer=lambda: load_tokenizer(None), mode=mode))
    assert len(tree.samples.node) == len(loaded.samples)
    for i, sample in enumerate(loaded.samples):
        assert tokens_of(tree.path_keys(tree.samples.node[i])).tolist() == sample.input_ids_N.tolist()
        assert tree.samples.num_targets[i] == sample.num_targets
        assert tree.samples.session[i] == (sample.uid, sample.session)
        assert (tree.samples.index[i], tree.samples.where[i]) == (sample.index, sample.where)
    targets = {
        (tuple(s.input_ids_N[: t + 1].tolist())) for s in loaded.samples for t in np.flatnonzero(s.loss_mask_N).tolist()
    }
    assert sum(int(mask.sum()) for mask in tree.targets) == len(targets)


def test_a_conversation_that_begins_with_the_assistant_is_refused(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    row = {"task": "t", "trial": 0, "template": "raw", "messages": [{"role": "assistant", "content": "hi"}]}
    path.write_text(json.dumps(row))
    with pytest.raises(InputError, match=r"c\.jsonl:1: the conversation begins with the assistant"):
        list(read_streams([path], tokenizer=lambda: load_tokenizer(None)))


# ------------------------------------------------------------------------------------------------------- predictions
def test_named_shapes():
    assert load_shape("qwen2.5-7b").footprint == KVFootprint(57_344, 114_688, attention_bytes_per_token=203_840)
    assert load_shape("llama3-8b").footprint.kv_bytes_per_token == 131_072
    assert load_shape("qwen3-30b-a3b", "float32").footprint == KVFootprint(
        196_608, 196_608, attention_bytes_per_token=792_576
    )
    moe = load_shape("qwen3-30b-a3b").shape
    assert moe.flops_per_token / 2 + moe.hidden_size * moe.output_size == pytest.approx(3.03e9, rel=1e-2)  # its "a3b"


def test_shape_from_a_config(tmp_path: Path):
    values = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    wanted = ModelShape(2, 64, 4, 4, 16, 128, 512)
    assert load_shape(str(tmp_path)).shape == load_shape(str(path)).shape == wanted
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for count_key in ("num_experts", "n_routed_experts", "num_local_experts"):
        path.write_text(json.dumps(values | experts | {count_key: 4}))
        assert load_shape(str(path)).shape.ffn_size == 64
    path.write_text(json.dumps(values | experts))
    with pytest.raises(InputError, match="num_experts must be a positive integer, got None"):
        load_shape(str(path))
    latent = {
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8
    }  # fmt: skip
    path.write_text(json.dumps(values | latent))
    shaped = load_shape(str(path), "float32")
    assert shaped.shape.latent == LatentShape(query_rank=0, kv_rank=16, plain_dim=12, rotary_dim=4, value_dim=8)
    assert shaped.footprint.kv_bytes_per_token == 2 * 20 * 4
    path.write_text(json.dumps(values | {"vocab_size": "many"}))
    with pytest.raises(InputError, match="vocab_size must be a positive integer, got 'many'"):
        load_shape(str(path))


def test_best_budget():
    rows = [BudgetFigures(m, flops_unshared=100.0, flops_psrl=f, memory_bytes=b)
            for m, f, b in ((10, 20.0, 110), (20, 10.1, 80), (40, 10.0, 90))]  # fmt: skip
    assert best_budget(rows, None).max_tokens == 20  # within 2 % of the best
    assert best_budget(rows, 85).max_tokens == 20
    assert best_budget(rows, 79) is None
    rows[1].flops_psrl = 11.0
    assert best_budget(rows, None).max_tokens == 40


def test_attention_is_kept_where_there_is_room(rows_file: Path):
    """Spine segments are 1, 2 and 3, 4: a token of the second sees more, so it is kept first."""
    options = AnalyzeOptions((rows_file,), max_tokens=(2,))
    row, per_pair = analyze(options).budgets[0], load_shape(options.shape).shape.flops_per_pair
    assert row.attention_bytes == 4 * 203_840
    assert row.memory_bytes == row.kv_bytes_peak + row.attention_bytes + row.activation_bytes

    def within(num_bytes: int):
        return analyze(dataclasses.replace(options, memory_gib=(num_bytes + 0.5) / 2**30)).budgets[0]

    assert within(row.memory_bytes) == row
    one, none = within(row.memory_bytes - 1), within(row.memory_bytes - 2 * 203_840 - 1)
    assert (one.attention_bytes, one.flops_psrl - row.flops_psrl) == (2 * 203_840, pytest.approx((1 + 2) * per_pair))
    assert (none.attention_bytes, none.flops_psrl - row.flops_psrl) == (0, pytest.approx((1 + 2 + 3 + 4) * per_pair))


# ------------------------------------------------------------------------------------------------------- the command
def psrl(*args: object):
    return CliRunner().invoke(app, ["analyze", *map(str, args)], env={"COLUMNS": "200"})


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """A trajectory of two steps, and another of the same prompt."""
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1], "uid": "a", "session": "a0", "index": 0},
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 0, 0, 1], "uid": "a", "session": "a0", "index": 1},
        {"input_ids": [1, 2, 3, 7], "loss_mask": [0, 0, 0, 1], "uid": "a", "session": "a1"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_has_the_promised_keys(rows_file: Path, tmp_path: Path):
    out = tmp_path / "a.json"
    result = psrl(rows_file, "--max-tokens", 4, "--max-tokens", 2, "--json", out)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    counts = {key: record[key] for key in ("samples", "tokens", "unique_tokens", "trajectories", "groups", "targets")}
    assert counts == {"samples": 3, "tokens": 14, "unique_tokens": 7, "trajectories": 2, "groups": 1, "targets": 3}
    assert record["prefix_match_rate"] == record["match_rate_group"] == 0.5
    assert record["match_rate_trajectory"] == pytest.approx(1 - 10 / 14)
    assert record["response_share"] == pytest.approx(3 / 14)
    budgets = [
        [row[key] for key in ("max_tokens", "spine_tokens", "computed_tokens_unshared", "computed_tokens_tree_packing",
                              "computed_tokens_psrl")]
        for row in record["budgets"]
    ]  # fmt: skip
    assert budgets == [[2, 4, 14, 14, 11], [4, 3, 14, 14, 10]]
    assert record["tree_packing_of_longest_sample"]["computed_tokens"] == 6 + 4
    for name in ("samples", "match rate", "50.00%", "speed-up"):
        assert name in result.stdout


def test_mini_batches_are_analysed_one_by_one(rows_file: Path):
    whole = analyze(AnalyzeOptions((rows_file,), max_tokens=(4,)))
    cut_up = analyze(AnalyzeOptions((rows_file,), max_tokens=(4,), mini_batch=1))
    assert (whole.counts.unique_tokens, cut_up.counts.unique_tokens, cut_up.counts.mini_batches) == (7, 14, 3)
    assert cut_up.budgets[0].flops_psrl < cut_up.budgets[0].flops_unshared  # fewer logit rows only
    assert (len(cut_up.groups), len(cut_up.sessions)) == (1, 2)


def test_page_is_one_file(rows_file: Path, tmp_path: Path):
    page = tmp_path / "a.html"
    assert psrl(rows_file, "--html", page, "--tokenizer", "bytes").exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 4 and "<script" not in text
    assert not any(word in text for word in ("http://", "https://", "src=", "@import", "url("))


def test_public_options_are_these():
    params = typer.main.get_command(app).commands["analyze"].params  # type: ignore[attr-defined]
    assert sorted(name for param in params for name in (param.opts or [param.name]) if name != "--help") == [
        "--dtype", "--html", "--json", "--limit", "--max-tokens", "--memory-gib", "--mini-batch", "--mode", "--shape",
        "--tokenizer", "files",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be in 1 .. 1099511627776, got 0"),
        (["--mini-batch", "0"], "--mini-batch must be at least 1, got 0"),
        (["--memory-gib", "nan"], "--memory-gib must be a finite number above 0, got nan"),
        (["--mode", "turn"], "--mode must be one of step, trajectory, got 'turn'"),
        (["--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, float64, got 'int8'"),
        (["--json", "no/such/folder"], "--json no/such/folder: the folder"),
        (["--shape", "gpt-2"], "--shape gpt-2: cannot read gpt-2/config.json"),
    ],
)
def test_bad_option(rows_file: Path, args: list[str], message: str):
    result = psrl(rows_file, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"psrl: error: {message}") and result.stderr.count("\n") == 1


def test_results_do_not_replace_the_input(rows_file: Path, tmp_path: Path):
    before = rows_file.read_bytes()
    assert psrl(rows_file, "--html", rows_file).exit_code == 2
    assert psrl(rows_file, "--json", tmp_path / "x", "--html", tmp_path / "x").exit_code == 2
    assert rows_file.read_bytes() == before and not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="no input files"):
        AnalyzeOptions(())


def test_it_needs_no_torch(rows_file: Path):
    code = (
        "import sys\nfrom psrl.cli.main import app\n"
        f"try:\n    app(['analyze', {str(rows_file)!r}])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'verl', 'megatron', 'matplotlib'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -------------------------------------------------------------------------------------------------------- large files
@pytest.mark.slow
def test_36_million_tokens_in_a_minute_and_4_gb():
    """Step-wise traces of a coding agent. Processor time counts: other work on the machine does not."""
    path = SHARED / "traces" / "miniswe_gemini3pro.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no recorded traces: {path}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "psrl.cli.main", "analyze", str(path), "--json", "/dev/stdout"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    record = json.JSONDecoder().raw_decode(result.stdout)[0]
    assert (record["samples"], record["tokens"]) == (1338, 76_653_032)  # tokens are bytes: more than 36 million
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert after.ru_maxrss < 4_000_000  # KiB, the largest of all children


def test_gzip_is_read_as_it_is(rows_file: Path, tmp_path: Path):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(rows_file.read_bytes()))
    assert analyze(AnalyzeOptions((packed,))).counts.tokens == 14
