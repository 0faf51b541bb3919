"""What the engines did in a phase of a training step, as metrics in veRL's tracker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils.device import get_device_name
from verl.workers.utils.padding import no_padding_2_padding

from psrl.integrations.megatron.backend_choice import BackendChoice

PHASES = ("old_log_prob", "ref", "values", "update", "update_critic")


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One call of an engine's ``forward_backward_batch`` on one rank."""

    num_samples: int
    num_tokens: int
    unique_tokens: int
    """Tokens computed; all of them where prefixes are not shared."""
    spine_tokens: int
    """Tokens computed forward twice."""
    kv_bytes_peak: int
    """Measured peak of cached K/V and gradient accumulators on the device, bytes."""
    flops_unshared: float
    flops_shared: float
    planning_seconds: float
    planning_wait_seconds: float
    """Of them, those in which no pass ran."""
    seconds: float
    cpu_seconds: float
    """Processor time of the rank's process, all its threads."""
    max_log_ratio: float | None
    """Largest |log-prob - old log-prob| over the response tokens, of an actor's update."""
    kv_host_bytes_peak: int = 0
    kv_bytes_to_host: int = 0
    kv_bytes_to_device: int = 0
    recomputed_tokens: int = 0
    attention_bytes: int = 0
    """Measured peak of attention's results that an update kept for its second pass."""


class EngineProbe:
    """Records every ``forward_backward_batch`` of an engine. Replaces the method on the instance."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._run: Callable[..., dict[str, Any]] = engine.forward_backward_batch
        self._records: list[PassRecord] = []
        engine.forward_backward_batch = self._probed

    def _probed(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        start, cpu_start = time.perf_counter(), time.process_time()
        output = self._run(data, loss_function, forward_only)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        self._records.append(self._record(data, output, forward_only, seconds, cpu_seconds))
        return output

    def _record(
        self, data: TensorDict, output: dict[str, Any], forward_only: bool, seconds: float, cpu_seconds: float
    ) -> PassRecord:
        ratio = None if forward_only else max_log_ratio(output.get("model_output") or {}, data)
        report = self._engine.last_report if self._engine.psrl_config.enable else None
        if report is None:
            num_tokens = data["input_ids"].values().shape[0]
            return PassRecord(len(data), num_tokens, num_tokens, 0, 0, 0.0, 0.0, 0.0, 0.0, seconds, cpu_seconds, ratio)
        stats = report.stats
        return PassRecord(
            num_samples=stats.num_samples,
            num_tokens=stats.num_tokens,
            unique_tokens=stats.unique_tokens,
            spine_tokens=stats.spine_tokens,
            kv_bytes_peak=report.kv_bytes_measured,
            flops_unshared=stats.flops_unshared,
            flops_shared=stats.flops_shared,
            planning_seconds=report.planning_seconds,
            planning_wait_seconds=report.planning_wait_seconds,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            max_log_ratio=ratio,
            kv_host_bytes_peak=report.kv_bytes.host_peak,
            kv_bytes_to_host=report.kv_bytes.to_host,
            kv_bytes_to_device=report.kv_bytes.to_device,
            recomputed_tokens=stats.recomputed_tokens,
            attention_bytes=report.attention_bytes,
        )

    def drain(self) -> list[PassRecord]:
        """Records since the last call, oldest first. Of several ranks that hold one replica, the one with outputs."""
        records, self._records = self._records, []
        return records if self._engine.is_mp_src_rank_with_outputs() else []

    def describe(self) -> dict[str, str]:
        """The engine as the startup line has it."""
        config = self._engine.psrl_config
        if config.enable:
            attention = f"{self._engine.attention_choice}, {self._engine.path_access}"
        else:
            attention = str(BackendChoice.unmeasured(config.attention_backend, get_device_name()))
        return {
            "sharing": "on" if config.enable else "off",
            "device": get_device_name(),
            "attention": attention,
            "dtype": str(self._engine.param_dtype).removeprefix("torch."),
            "max_tokens": str(config.max_tokens or self._engine.engine_config.max_token_len_per_gpu),
            "infer_max_tokens": str(config.infer_max_tokens or self._engine.engine_config.infer_max_token_len_per_gpu),
        }


def max_log_ratio(outputs: dict[str, Any], data: TensorDict) -> float | None:
    """Largest |log-prob - old log-prob| over the response tokens that train; None without both, 0.0 without any."""
    log_probs = outputs.get("log_probs")
    if log_probs is None or "old_log_probs" not in data:
        return None
    padded = data.select("old_log_probs", "response_mask").to_padded_tensor()
    new: Tensor = no_padding_2_padding(log_probs, data)
    differences = (new.detach() - padded["old_log_probs"].to(new.device)).abs()
    chosen = differences[padded["response_mask"].to(new.device).bool()]
    return float(chosen.max()) if chosen.numel() else 0.0


def phase_metrics(phase: str, ranks: Sequence[Sequence[PassRecord]]) -> dict[str, float]:
    """Metrics ``psrl/<phase>/*`` of a phase from the records of its ranks. Empty without any record; those of the host
    tier and of kept attention where they are in use.

    Tokens, bytes moved and seconds are sums over the phase's calls; tokens and bytes also over ranks, of seconds the
    slowest rank's count.
    """
    ranks = [records for records in ranks if records]
    if not ranks:
        return {}
    everything = [record for records in ranks for record in records]

    def total(name: str, records: Iterable[PassRecord] = everything) -> float:
        return float(sum(getattr(record, name) for record in records))

    tokens, unique = total("num_tokens"), total("unique_tokens")
    values = {
        "samples": total("num_samples"),
        "tokens": tokens,
        "unique_tokens": unique,
        "spine_tokens": total("spine_tokens"),
        "prefix_match_rate": 1.0 - unique / tokens if tokens else 0.0,
        "kv_bytes_peak": float(max(record.kv_bytes_peak for record in everything)),
        "planning_seconds": max(total("planning_seconds", records) for records in ranks),
        "planning_wait_seconds": max(total("planning_wait_seconds", records) for records in ranks),
        "seconds": max(total("seconds", records) for records in ranks),
        "cpu_seconds": max(total("cpu_seconds", records) for records in ranks),
    }
    if any(record.kv_bytes_to_host for record in everything):
        values["kv_host_bytes_peak"] = float(max(record.kv_host_bytes_peak for record in everything))
        values["kv_bytes_to_host"] = total("kv_bytes_to_host")
        values["kv_bytes_to_device"] = total("kv_bytes_to_device")
    if recomputed := total("recomputed_tokens"):
        values["recomputed_tokens"] = recomputed
    if kept := max(record.attention_bytes for record in everything):
        values["attention_bytes"] = float(kept)
    shared = total("flops_shared")
    if shared:
        values["ideal_speedup"] = total("flops_unshared") / shared
        work = [total("flops_shared", records) for records in ranks]
        values["load_imbalance"] = max(work) * len(work) / sum(work)
    ratios = [records[0].max_log_ratio for records in ranks if records[0].max_log_ratio is not None]
    if ratios:
        values["first_log_ratio"] = max(ratios)
    return {f"psrl/{phase}/{name}": value for name, value in values.items()}


def headline_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """``psrl/*`` of a whole step, from those of its phases: the update's, the highest peak, all planning."""
    found: dict[str, float] = {}
    for name in ("prefix_match_rate", "tokens", "unique_tokens", "spine_tokens", "ideal_speedup", "first_log_ratio"):
        if (value := metrics.get(f"psrl/update/{name}")) is not None:
            found[f"psrl/{name}"] = value
    peaks = [v for k, v in metrics.items() if k.startswith("psrl/") and k.endswith("/kv_bytes_peak")]
    if peaks:
        found["psrl/kv_bytes_peak"] = max(peaks)
    for name in ("planning_seconds", "planning_wait_seconds"):
        seconds = [v for k, v in metrics.items() if k.startswith("psrl/") and k.endswith(f"/{name}")]
        if seconds:
            found[f"psrl/{name}"] = sum(seconds)
    return found


def trajectory_reward(trajectories: Sequence[tuple[str, str]], rewards: Sequence[float]) -> float:
    """Mean over trajectories of the mean over a trajectory's samples. A mean over samples would count a trajectory as
    often as it has steps.

    Args:
        trajectories: prompt and session of every sample.
        rewards: of every sample.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        found.setdefault(trajectory, []).append(reward)
    return sum(sum(values) / len(values) for values in found.values()) / len(found)


_TIMERS = {
    "rollout": "gen",
    "old log-prob": "old_log_prob",
    "reference": "ref",
    "values": "values",
    "update": "update_actor",
    "critic update": "update_critic",
}
"""The phases as a line of a step names them, and as veRL's timers do."""


def step_line(metrics: Mapping[str, Any], step: int, num_steps: int) -> str:
    """A training step in a line: reward, sharing in the update, seconds per phase. Phases that did not run are left
    out."""
    parts = [f"step {step}/{num_steps}: reward {metrics['psrl/trajectory_reward']:.3f}"]
    if "psrl/tokens" in metrics:
        parts.append(
            f"update of {int(metrics['psrl/tokens']):,} tokens, {metrics['psrl/prefix_match_rate']:.0%} shared"
            + (f", ideal speed-up {metrics['psrl/ideal_speedup']:.1f}x" if "psrl/ideal_speedup" in metrics else "")
        )
    seconds = {name: metrics.get(f"timing_s/{timer}") for name, timer in _TIMERS.items()}
    total = float(metrics["timing_s/step"])
    phases = [f"{name} {value:.1f}" for name, value in seconds.items() if value is not None]
    parts.append(f"seconds: {', '.join(phases)}, whole step {total:.1f}")
    return "; ".join(parts)
