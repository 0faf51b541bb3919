"""``scripts/launch_multinode.sh ray``: a cluster of two nodes, each with an address of its own, and a job on both."""

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.jobs import REPOSITORY, Job, assert_gone, command_line, environment, free_port, make_assets, start

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

ADDRESSES = ("127.0.0.2", "127.0.0.3")
"""Ray takes 127.0.0.1 for a name of whatever address the machine has."""
OF_JOB = "^ray::(?!IDLE|DashboardAgent|RuntimeEnvAgent)[A-Z]"
"""Actors, as Ray names their processes: not those that wait for work, nor Ray's own."""


class Cluster(NamedTuple):
    first: Job
    second: Job

    def processes(self) -> set[int]:
        return {pid for node in self for pid in (node.process.pid, *node.processes())}


@contextlib.contextmanager
def launched(folder: Path, *overrides: str) -> Iterator[Cluster]:
    """Two nodes with a slot each, started in working folders of their own."""
    job = ["--config-name", "cpu_quickstart", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", *overrides]
    temporary = Path(tempfile.mkdtemp(prefix="ray"))  # short: of sockets' paths
    port, nodes = str(free_port()), []
    try:
        for rank, address in enumerate(ADDRESSES):
            folder_of_node = folder / address
            folder_of_node.mkdir(exist_ok=True)
            nodes.append(
                start(
                    [str(REPOSITORY / "scripts" / "launch_multinode.sh"), "ray", *(job if rank == 0 else [])],
                    folder_of_node,
                    NNODES="2",
                    NODE_RANK=str(rank),
                    MASTER_ADDR=ADDRESSES[0],
                    MASTER_PORT=port,
                    PSRL_VENV=sys.prefix,
                    RAY_ARGS=f"--num-cpus=24 --num-gpus=1 --node-ip-address={address} --temp-dir={temporary / address}",
                    VERL_FILE_LOGGER_PATH=str(folder / ADDRESSES[0] / "metrics.jsonl"),
                )
            )
        yield Cluster(*nodes)
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
        shutil.rmtree(temporary, ignore_errors=True)  # those that were killed may still write there


def test_a_job_on_two_nodes(tmp_path):
    """Its paths are relative to where it is started; the other node is started elsewhere."""
    (tmp_path / ADDRESSES[0]).mkdir()
    make_assets(tmp_path / ADDRESSES[0] / "assets")
    with launched(
        tmp_path,
        "job_dir=assets",
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
    ) as cluster:
        cluster.first.wait_for(cluster.first.steps, "the first step")
        processes = cluster.processes()
        # Every process of the job, on both nodes, has the plug-in and the folder of configurations.
        for node in cluster:
            of_job = {command_line(pid).split("(")[0]: environment(pid) for pid in node.processes(OF_JOB)}
            assert any("WorkerDict" in name for name in of_job), of_job.keys()
            for name, variables in of_job.items():
                assert variables.get("VERL_USE_EXTERNAL_MODULES") == "psrl.integrations.verl.plugin", name
                assert variables.get("PSRL_CONFIG_DIR") == str(REPOSITORY / "configs"), name
        assert cluster.first.finish() == 0, cluster.first.output()[-8000:]
        assert cluster.second.finish(60) == 0, cluster.second.output()[-8000:]
        assert_gone(processes, seconds=30)
    output, steps = cluster.first.output(), cluster.first.steps()
    assert re.search(r"psrl: joins the Ray cluster at 127.0.0.2:\d+, which decides about num_cpus, num_gpus", output)
    assert "psrl: sharing prefixes in update, old log-prob, reference; Megatron on cpu (float32), 2 data-par" in output
    assert "node 1: the cluster has ended" in cluster.second.output()
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["psrl/update/samples"] == metrics["psrl/placement/rows"]
        assert metrics["psrl/prefix_match_rate"] > 0.3
        assert metrics["psrl/first_log_ratio"] <= 1e-5
    assert (tmp_path / ADDRESSES[0] / "assets" / "checkpoints" / "global_step_2" / "psrl_checkpoint.json").is_file()
    assert not any((tmp_path / ADDRESSES[1]).rglob("checkpoints"))


def test_a_node_that_is_lost_ends_the_job_with_its_name(tmp_path):
    assets = make_assets(tmp_path / "assets")
    with launched(
        tmp_path, f"job_dir={assets}", "trainer.logger=[console,file]", "trainer.total_training_steps=1000"
    ) as cluster:
        cluster.first.wait_for(cluster.first.steps, "the first step")
        processes = cluster.processes()
        on_second = cluster.second.processes(OF_JOB)
        cluster.second.process.send_signal(signal.SIGTERM)
        assert cluster.second.finish(60) == 143
        assert cluster.first.finish(120) == 1, cluster.first.output()[-8000:]
        assert_gone(processes, seconds=30)
    (line,) = (line for line in cluster.first.output().splitlines() if line.startswith("psrl: error: "))
    death = re.search(r"\(pid (\d+) on 127.0.0.3\) died: its node is lost", line)
    assert death and int(death[1]) in on_second, line
