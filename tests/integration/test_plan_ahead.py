"""An update plans its next mini-batch while one runs, with the results that it has without."""

import threading
from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu

from psrl.config import PSRLConfig
from psrl.errors import InputError
from psrl.integrations.verl import mini_batch
from psrl.integrations.verl.batch_plans import planned_ahead, training
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
    def make(loss_fn=None, **psrl):
        return make_worker(checkpoint, psrl=PSRLConfig(**psrl), loss_fn=loss_fn, lr=1e-2)

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
    plan_update, run_plan = engine.plan_update, mini_batch.run_plan
    caller = threading.current_thread()

    def planning(data):
        index = sum(name == "plan" for name, _ in events)
        events.append(("plan", index))
        assert threading.current_thread() is not caller
        begun[index].set()
        return plan_update(data)

    def running(*args):
        index = sum(name == "begin" for name, _ in events)
        events.append(("begin", index))
        run_plan(*args)
        assert begun[index + 1].wait(SECONDS), f"mini-batch {index + 1} is not planned while {index} runs"
        events.append(("end", index))

    monkeypatch.setattr(engine, "plan_update", planning)
    monkeypatch.setattr(mini_batch, "run_plan", running)
    reports = train(busy, mini_batches(), 4, at_once=True)
    assert len(reports) == NUM_MINI_BATCHES
    for index in range(NUM_MINI_BATCHES - 1):
        assert events.index(("plan", index + 1)) < events.index(("end", index))
        assert events.index(("plan", index)) < events.index(("begin", index))
    # One ahead, not all at once.
    assert events.index(("plan", 2)) > events.index(("end", 0))


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
    plain.engine.plan_update = None  # would raise
    plain.train_mini_batch(batch_of(mini_batches(), 1000))


def test_an_error_of_cutting_out_comes_when_the_mini_batch_is_asked_for():
    def source():
        yield batch_of(mini_batches(), 4)
        raise RuntimeError("no second one")

    planned = []
    engine = SimpleNamespace(plan_update=planned.append, expect_plans=lambda data, plans: plans.result())
    with training(engine):
        ahead = planned_ahead(source())
        assert next(ahead)["input_ids"].is_nested and len(planned) == 1
        with pytest.raises(RuntimeError, match="no second one"):
            next(ahead)
