"""Latency and bandwidth between two processes: point-to-point transfers and all-reduces of several sizes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from psrl.simulate.calibration import Link

REPOSITORY = Path(__file__).resolve().parents[1]
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Bytes."""
_REPEATS = 12


def measure_link(timeout: float = 300.0) -> Link:
    """Time two processes of this machine (gloo, or NCCL with two GPUs or more).

    Raises:
        subprocess.CalledProcessError: a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="psrl_links_") as folder:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "benchmarks.measured_links", folder]
        other = subprocess.Popen([*command, "1"], env=environment, cwd=REPOSITORY)
        try:
            subprocess.run([*command, "0"], env=environment, cwd=REPOSITORY, check=True, timeout=timeout)
            if other.wait(timeout):
                raise subprocess.CalledProcessError(other.returncode, command)
        finally:
            if other.poll() is None:
                other.kill()
                other.wait()
        send, reduce = pickle.loads((Path(folder) / "result").read_bytes())
    latency, per_byte = _line(send)
    collective_latency, collective_per_byte = _line(reduce)
    return Link(latency, 1 / per_byte, collective_latency, 1 / collective_per_byte)


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """(seconds of nothing, seconds a byte): the smallest size, and the slope from there to the largest."""
    small, large = min(seconds), max(seconds)
    per_byte = max((seconds[large] - seconds[small]) / (large - small), 1e-15)
    return max(seconds[small] - small * per_byte, 0.0), per_byte


def _main(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=2)

    def fastest(run: Callable[[], object]) -> float:
        """Other work on the machine only ever adds to the time."""
        times = []
        for _ in range(_REPEATS):
            dist.barrier()
            start = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    send: dict[int, float] = {}
    reduce: dict[int, float] = {}
    for size in SIZES:
        data = torch.zeros(size // 4, device=device)

        def there_and_back(data: torch.Tensor = data) -> None:
            for sender in (0, 1):
                dist.send(data, 1 - rank) if rank == sender else dist.recv(data, 1 - rank)

        send[size] = fastest(there_and_back) / 2
        # Two processes send what they hold once: 2 (n - 1) / n = 1.
        reduce[size] = fastest(lambda data=data: dist.all_reduce(data))
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps((send, reduce)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
