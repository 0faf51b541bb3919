"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

The format is described in "Trace Event Format" of the Catapult project. Phases used: X a slice, i an instant, s and f
the two ends of a flow, C a counter, M a name.
"""

from __future__ import annotations

from typing import Any

from psrl.plan_view.timeline import Execution, Timeline
from psrl.types import ExecutionPlan

FLOPS_PER_MICROSECOND = 1e9
"""A microsecond of the trace is a GFLOP: a device of 1 PFLOP/s would take as long."""
_PID = 1
_WAVES, _PASS1, _PASS2, _CACHE, _TRANSFERS = 0, 1, 2, 3, 4
_THREADS = {_WAVES: "waves", _PASS1: "pass 1: forward only", _PASS2: "pass 2: forward and backward", _CACHE: "KV cache"}
_HOST_THREAD = {_TRANSFERS: "transfers with the host"}


def make_trace(plan: ExecutionPlan, timeline: Timeline) -> dict[str, Any]:
    """The trace as JSON values: ``traceEvents``, and the plan's figures in ``otherData``."""
    events: list[dict[str, Any]] = [_name("process_name", _WAVES, "psrl plan")]
    events += [_name("thread_name", thread, name) for thread, name in _threads(plan).items()]
    events += _waves(plan, timeline)
    wrote: dict[int, Execution] = {}
    flow = 0
    for execution in timeline.executions:
        events += [_slice(plan, execution), *_cache_events(plan, execution), *_counters(execution)]
        if plan.tiers is not None:
            events += _transfers(execution)
        for block in execution.writes:
            wrote[block] = execution
        for block in execution.reads:
            flow += 1
            events += _flow(flow, block, wrote[block], execution)
    stats = plan.stats
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "unit": "1 microsecond is 1 GFLOP",
            "samples": stats.num_samples,
            "tokens": stats.num_tokens,
            "unique_tokens": stats.unique_tokens,
            "spine_tokens": stats.spine_tokens,
            "recomputed_tokens": stats.recomputed_tokens,
            "kv_bytes_peak": stats.kv_bytes_peak,
            "kv_host_bytes_peak": stats.kv_host_bytes_peak,
            "kv_bytes_to_host": stats.kv_bytes_to_host,
            "kv_bytes_to_device": stats.kv_bytes_to_device,
            "ideal_speedup": stats.ideal_speedup,
        },
    }


def _threads(plan: ExecutionPlan) -> dict[int, str]:
    return _THREADS if plan.tiers is None else _THREADS | _HOST_THREAD


def _time(flops: float) -> float:
    return flops / FLOPS_PER_MICROSECOND


def _track(execution: Execution) -> int:
    return _PASS2 if execution.backward else _PASS1


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": thread, "args": {"name": name}}


def _waves(plan: ExecutionPlan, timeline: Timeline) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number in range(len(plan.waves)):
        members = [e for e in timeline.executions if e.wave == number]
        out.append(
            {
                "ph": "X", "name": f"wave {number}", "cat": "wave", "pid": _PID, "tid": _WAVES,
                "ts": _time(members[0].start), "dur": _time(members[-1].end - members[0].start),
                "args": {"micro_batches": len(members)},
            }
        )  # fmt: skip
    return out


def _slice(plan: ExecutionPlan, execution: Execution) -> dict[str, Any]:
    mb = plan.micro_batches[execution.micro_batch]
    kind = "spine" if mb.is_spine else "leaf"
    return {
        "ph": "X", "name": f"{kind} {mb.index}", "cat": f"micro-batch,{kind}", "pid": _PID, "tid": _track(execution),
        "ts": _time(execution.start), "dur": _time(execution.flops),
        "args": {
            "micro_batch": mb.index, "wave": execution.wave, "flops": execution.flops, "tokens": mb.num_tokens,
            "path_tokens": mb.path_len, "logit_rows": len(mb.rows_R), "completes_samples": len(mb.completes),
            "reads_blocks": list(execution.reads), "writes_blocks": list(execution.writes),
        },
    }  # fmt: skip


def _cache_events(plan: ExecutionPlan, execution: Execution) -> list[dict[str, Any]]:
    """Everything that takes memory at the start, as it counts there; frees at the end."""
    out: list[dict[str, Any]] = []
    for name, blocks, time in (
        ("read", execution.reads, execution.start),
        ("new gradients", execution.new_grads, execution.start),
        ("write", execution.writes, execution.start),
        ("free K/V", execution.freed_kv, execution.end),
        ("free gradients", execution.freed_grads, execution.end),
    ):
        if blocks:
            tokens = sum(plan.blocks[b].num_tokens for b in blocks)
            out.append(
                {
                    "ph": "i", "s": "t", "name": name, "cat": "cache", "pid": _PID, "tid": _CACHE, "ts": _time(time),
                    "args": {"blocks": list(blocks), "tokens": tokens, "micro_batch": execution.micro_batch},
                }
            )  # fmt: skip
    return out


def _counters(execution: Execution) -> list[dict[str, Any]]:
    """Bytes while it runs, and after it."""
    return [
        {"ph": "C", "name": "KV bytes", "pid": _PID, "ts": _time(time), "args": {"K/V": kv, "gradients": grads}}
        for time, kv, grads in (
            (execution.start, execution.kv_bytes, execution.grad_bytes),
            (execution.end, execution.kv_bytes_after, execution.grad_bytes_after),
        )
    ]


def _transfers(execution: Execution) -> list[dict[str, Any]]:
    """What an execution moves, over its layers, and what the host holds. How long transfers take is not known."""
    host: list[dict[str, Any]] = [
        {
            "ph": "C", "name": "host bytes", "pid": _PID, "ts": _time(execution.start),
            "args": {"copies": execution.host_bytes},
        }
    ]  # fmt: skip
    moved = (("to host", execution.bytes_to_host), ("to device", execution.bytes_to_device))
    return host + [
        {
            "ph": "i", "s": "t", "name": name, "cat": "transfer", "pid": _PID, "tid": _TRANSFERS,
            "ts": _time(execution.start), "args": {"bytes": size, "micro_batch": execution.micro_batch},
        }
        for name, size in moved if size
    ]  # fmt: skip


def _flow(number: int, block: int, writer: Execution, reader: Execution) -> list[dict[str, Any]]:
    """An arrow from the slice that wrote a block to one that reads it."""
    common = {"cat": "kv", "name": f"block {block}", "id": number, "pid": _PID}
    return [
        # Inside the two slices, so that viewers bind the ends to them.
        {"ph": "s", **common, "tid": _track(writer), "ts": _time(writer.start + writer.flops / 2)},
        {"ph": "f", "bp": "e", **common, "tid": _track(reader), "ts": _time(reader.start + reader.flops / 2)},
    ]
