"""What is planned while something else runs, and what is planned once: with the results that there are without."""

import threading
from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu

from psrl.config import PSRLConfig
from psrl.errors import InputError
from psrl.integrations.verl.engine import batch_plans, mini_batch
from psrl.integrations.verl.engine.batch_plans import LastForward
from psrl.integrations.verl.engine.plan_ahead import planned_ahead, updates_planned
from psrl.replay.side import observed
from tests.helpers import Row, batch_tensordict, make_checkpoint, make_worker, ppo_loss_fn
from tests.helpers.forests import step_rows, tree_rows

NUM_MINI_BATCHES = 3
MAX_TOKENS = 16
BUDGET = 24_000
"""Bytes of the cache, below the peak of a plan without a budget (27,648, 26,112 and 30,720)."""
SECONDS = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def worker(checkpoint):
    def make(loss_fn=None, options=None, **psrl):
        return make_worker(checkpoint, psrl=PSRLConfig(**psrl), loss_fn=loss_fn, lr=1e-2, **(options or {}))

    return make


def mini_batches() -> list[list[Row]]:
    rows = tree_rows() + step_rows()
    size = len(rows) // NUM_MINI_BATCHES
    return [rows[i * size : (i + 1) * size] for i in range(NUM_MINI_BATCHES)]


def batch_of(parts: list[list[Row]], max_tokens: int):
    batch = batch_tensordict([row for rows in parts for row in rows], max_tokens=max_tokens)
    tu.assign_non_tensor(batch, mini_batch_size=len(parts[0]), global_batch_size=len(parts[0]))
    return batch


def weights(worker) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in worker.engine.get_per_tensor_param()[0]}


def train(worker, parts: list[list[Row]], max_tokens: int, *, at_once: bool):
    """Reports of all mini-batches of one call of the worker, or of a call for each."""
    with observed(worker) as seen:
        for call in [parts] if at_once else [[part] for part in parts]:
            worker.train_mini_batch(batch_of(call, max_tokens))
    return seen.reports


@pytest.mark.parametrize(("loss_mode", "budget"), [("vanilla", None), ("geo_mean", None), ("vanilla", BUDGET)])
def test_weights_and_plans_are_the_same(worker, loss_mode, budget):
    loss_fn = ppo_loss_fn(loss_mode)
    ahead, alone = (worker(loss_fn, kv_cache_bytes=budget) for _ in range(2))
    parts = [tree_rows(depth=4, seed=seed) for seed in range(NUM_MINI_BATCHES)]
    reports = [train(w, parts, MAX_TOKENS, at_once=w is ahead) for w in (ahead, alone)]
    assert [report.stats for report in reports[0]] == [report.stats for report in reports[1]]
    assert len(reports[0]) == NUM_MINI_BATCHES
    assert (max(report.stats.num_waves for report in reports[0]) > 1) == (budget is not None)
    for (name, ours), theirs in zip(weights(ahead).items(), weights(alone).values(), strict=True):
        assert torch.equal(ours, theirs), name
    for report in reports[0]:
        assert 0 < report.planning_seconds < report.seconds + SECONDS and report.planning_wait_seconds > 0


def test_the_next_mini_batch_is_planned_while_one_runs(worker, monkeypatch):
    """A mini-batch ends here only once the planning of the next one has begun."""
    busy = worker()
    engine, events = busy.engine, []
    begun = [threading.Event() for _ in range(NUM_MINI_BATCHES + 1)]
    begun[NUM_MINI_BATCHES].set()
    plan_update, run_plan = engine.planner.plan_update, mini_batch.run_plan
    caller = threading.current_thread()

    def planning(data, loss_function):
        index = sum(name == "plan" for name, _ in events)
        events.append(("plan", index))
        assert threading.current_thread() is not caller
        begun[index].set()
        return plan_update(data, loss_function)

    def running(*args):
        index = sum(name == "begin" for name, _ in events)
        events.append(("begin", index))
        run_plan(*args)
        assert begun[index + 1].wait(SECONDS), f"mini-batch {index + 1} is not planned while {index} runs"
        events.append(("end", index))

    monkeypatch.setattr(engine.planner, "plan_update", planning)
    monkeypatch.setattr(mini_batch, "run_plan", running)
    reports = train(busy, mini_batches(), 4, at_once=True)
    assert len(reports) == NUM_MINI_BATCHES
    for index in range(NUM_MINI_BATCHES - 1):
        assert events.index(("plan", index + 1)) < events.index(("end", index))
        assert events.index(("plan", index)) < events.index(("begin", index))
    # One ahead, not all at once.
    assert events.index(("plan", 2)) > events.index(("end", 0))


@pytest.mark.parametrize("phase", ["forward", "update"])
def test_a_call_is_planned_while_its_engine_is_loaded(worker, monkeypatch, phase):
    """Offloaded weights are loaded in ``to``: here neither it nor the planning goes on without the other."""
    busy = worker()
    engine, both, met = busy.engine, threading.Barrier(2, timeout=SECONDS), []

    def once(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            if name not in met:
                both.wait()
                met.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    once(engine, "to")
    if phase == "forward":
        once(engine.planner, "plan_forward")
        assert len(busy.infer_batch(batch_of(mini_batches(), MAX_TOKENS))["log_probs"]) == 18
    else:
        once(engine.planner, "plan_update")
        assert len(train(busy, mini_batches(), MAX_TOKENS, at_once=True)) == NUM_MINI_BATCHES
    assert sorted(met) == sorted(["to", "plan_forward" if phase == "forward" else "plan_update"])


def forward(worker, rows: list[Row], **batch):
    """Jagged outputs of a worker's forward, and the engine's report."""
    output = worker.infer_batch(
        batch_tensordict(rows, **{"max_tokens": MAX_TOKENS, "calculate_entropy": True, **batch})
    )
    return output, worker.engine.last_report


@pytest.mark.parametrize("says_budget", [True, False])
def test_outputs_of_a_forward_are_those_of_its_engine_alone(worker, says_budget):
    rows = tree_rows(depth=4)
    ahead, alone = (worker(options={"max_tokens": MAX_TOKENS}) for _ in range(2))
    batches = [batch_tensordict(rows, max_tokens=MAX_TOKENS, calculate_entropy=True) for _ in range(2)]
    if not says_budget:  # then the worker takes it from the engine, after planning has begun
        for batch in batches:
            del batch["max_token_len_per_gpu"]
    ours = ahead.infer_batch(batches[0])
    if not says_budget:
        tu.assign_non_tensor(batches[1], max_token_len_per_gpu=MAX_TOKENS)
    with alone.engine.eval_mode():
        theirs = alone.engine.infer_batch(batches[1])["model_output"]
    assert ahead.engine.last_report.stats == alone.engine.last_report.stats
    assert ahead.engine.last_report.stats.num_micro_batches > 1
    for kind in ("log_probs", "entropy"):
        torch.testing.assert_close(ours[kind].values(), theirs[kind].values(), rtol=0, atol=0, equal_nan=True)


def test_an_error_of_planning_a_forward_is_the_callers(worker):
    bad = worker()
    with pytest.raises(InputError, match="first token"):
        forward(bad, [Row([5, 6, 7], [1, 0, 0], uid="bad")])
    assert len(forward(bad, tree_rows())[0]["log_probs"]) == 8  # and the worker goes on


@pytest.fixture
def made(monkeypatch):
    """Trees and plans that were made, by name of the function."""
    calls = []

    def count(name):
        function = getattr(batch_plans, name)
        monkeypatch.setattr(batch_plans, name, lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs))

    count("build_tree")
    count("build_plan")
    return calls


def test_old_log_prob_reference_and_update_of_a_step_share_what_is_planned(worker, made):
    rows = tree_rows(depth=4)
    outputs, trained, counts = [], [], []
    for shares in (True, False):
        actor, ref = worker(), worker()
        if shares:
            actor.engine.planner.last_forward = ref.engine.planner.last_forward = LastForward()
        old, old_report = forward(actor, rows)
        counts.append((made.count("build_tree"), made.count("build_plan")))
        reference, ref_report = forward(ref, rows, calculate_entropy=False)
        counts.append((made.count("build_tree"), made.count("build_plan")))
        assert old_report.stats == ref_report.stats and old_report.stats.spine_tokens > 0
        train(actor, [rows], MAX_TOKENS, at_once=True)
        counts.append((made.count("build_tree"), made.count("build_plan")))
        outputs.append([old["log_probs"], old["entropy"], reference["log_probs"]])
        trained.append(weights(actor))
        made.clear()
    assert counts == [(1, 1), (1, 1), (1, 2), (1, 1), (2, 2), (3, 3)]
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=0, atol=0, equal_nan=True)
    for name, ours in trained[0].items():
        assert torch.equal(ours, trained[1][name]), name


def test_only_equal_samples_and_options_share_a_plan(worker, made):
    rows = tree_rows(depth=3)
    other = [Row([*r.input_ids[:-1], 99], r.loss_mask, uid=r.uid) for r in rows]
    actor, ref = worker(), worker()
    actor.engine.planner.last_forward = ref.engine.planner.last_forward = LastForward()
    forward(actor, rows)
    for new, (their_rows, batch) in {
        (1, 1): (rows, {}),
        (1, 2): (rows, {"max_tokens": 8}),
        (2, 3): (rows, {"temperature": 0.5}),
        (3, 4): (rows[::-1], {}),
        (4, 5): (other, {}),
        (5, 6): (rows, {}),  # only the last is remembered
    }.items():
        forward(ref, their_rows, **batch)
        assert (made.count("build_tree"), made.count("build_plan")) == new


def test_an_error_of_planning_belongs_to_its_mini_batch(worker):
    parts = mini_batches()
    bad = [Row([5, 6, 7], [1, 0, 0], uid="bad")] * len(parts[0])
    update = worker()
    with observed(update) as seen, pytest.raises(InputError, match="first token"):
        update.train_mini_batch(batch_of([*parts[:2], bad], 4))
    assert len(seen.reports) == 2
    assert len(train(update, parts, 4, at_once=True)) == NUM_MINI_BATCHES  # and the worker goes on


def test_without_sharing_mini_batches_are_left_alone(checkpoint):
    plain = make_worker(checkpoint)
    assert plain.engine.planner is None
    plain.train_mini_batch(batch_of(mini_batches(), 1000))
    assert len(plain.infer_batch(batch_of(mini_batches(), 1000))["log_probs"]) == 18


def test_an_error_of_cutting_out_comes_when_the_mini_batch_is_asked_for():
    def source():
        yield batch_of(mini_batches(), 4)
        raise RuntimeError("no second one")

    planned = []
    planner = SimpleNamespace(
        plan_update=lambda data, loss_function: planned.append(data), expect=lambda data, plans: plans.result()
    )
    with updates_planned(planner, ppo_loss_fn()):
        ahead = planned_ahead(source())
        assert next(ahead)["input_ids"].is_nested and len(planned) == 1
        with pytest.raises(RuntimeError, match="no second one"):
            next(ahead)
