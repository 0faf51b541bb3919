"""The simulator against what really runs: processes of veRL's worker, and Megatron's own schedules.

The cost model is calibrated in the processes that are measured, in turn with the runs and on other samples: a machine
that does other work too changes its speed from minute to minute. Processor time is compared, for the same reason.
"""

import numpy as np
import pytest

from benchmarks.calibrate import VOCABULARY, Sizes
from benchmarks.measured_schedule import measure_schedules, uneven_pipeline
from benchmarks.validate_simulator import compare, markdown
from psrl.data import ReplaySample
from psrl.simulate.cluster import ClusterLayout
from psrl.simulate.phases import PHASES
from psrl.simulate.schedule import run_pipelines

pytestmark = pytest.mark.slow

HIDDEN = 128
LARGEST_ERROR = 0.15


def agent_samples(seed: int = 0) -> list[ReplaySample]:
    """Step-wise samples of 4 prompts x 2 trajectories x 3 steps, each step 30 to 90 tokens longer."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(4):
        head = rng.integers(1, VOCABULARY, int(rng.integers(120, 300)))
        head[0] = prompt
        for trajectory in range(2):
            ids = head
            for step in range(3):
                more = int(rng.integers(30, 90))
                ids = np.concatenate([ids, rng.integers(1, VOCABULARY, more)])
                found.append(
                    ReplaySample(
                        where=f"{prompt}:{trajectory}:{step}",
                        input_ids_N=ids.astype(np.int64),
                        loss_mask_N=np.arange(len(ids)) >= len(ids) - more // 2,
                        position_ids_N=np.arange(len(ids), dtype=np.int64),
                        advantages_M=np.ones(more // 2),
                        old_log_probs_M=None,
                        uid=str(prompt),
                        session=str(trajectory),
                        index=step,
                    )
                )
    return found


def test_step_times_of_1_2_and_4_processes(capsys):
    found = []
    for num_ranks in (1, 2, 4):
        found += compare(
            agent_samples(),
            Sizes(HIDDEN, 3),
            None,
            layout=ClusterLayout(num_ranks),
            mini_batches=2,
            max_tokens=400,
            repeats=7,
        )
    with capsys.disabled():
        print(f"\n{markdown(found)}")
    assert [(c.layout.num_ranks, c.side, c.phase) for c in found] == [
        (ranks, side, phase) for ranks in (1, 2, 4) for side in ("psrl", "verl") for phase in PHASES
    ]
    errors = np.abs([c.error for c in found])
    assert np.median(errors) <= LARGEST_ERROR
    for ranks in (1, 2, 4):
        for side in ("psrl", "verl"):
            step = [c for c in found if (c.layout.num_ranks, c.side) == (ranks, side)]
            error = sum(c.predicted for c in step) / sum(c.measured for c in step) - 1
            assert abs(error) <= LARGEST_ERROR, f"{ranks} processes, {side}: {error:+.1%}"


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_schedules_are_those_of_megatron(stages, chunks, capsys):
    pipelines = [uneven_pipeline(stages, 8, chunks, seed, mean=0.1) for seed in range(2)]
    errors = []
    for timed in measure_schedules(pipelines):
        predicted = run_pipelines([timed.pipeline])[0].stage_seconds
        errors += (predicted / np.array(timed.stage_seconds) - 1).tolist()
    with capsys.disabled():
        print(f"\n{stages} stages of {chunks} chunks: {', '.join(f'{error:+.1%}' for error in errors)}")
    assert np.abs(errors).max() <= LARGEST_ERROR
