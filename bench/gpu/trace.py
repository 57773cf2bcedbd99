"""Stage: measures how far copies in both directions and updates run at the same time. Compares Kineto's trace of an
update with the timeline of the engine.

`busy_seconds`: for each kind of work (h2d, d2h, device), the time in which at least one such copy or update is in
progress. `overlap`: time in which two kinds are both in progress, divided by the smaller one of their busy times.
`kineto`: these figures as measured by CUPTI. `ours`: as measured by the engine's CUDA events. With --dry there is no
GPU to trace, so that `kineto` is absent. `timeline`: all ops of an iteration that is not traced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import SHAPES
from bench.gpu.sides import Ask, Training, build, cap_memory
from bench.gpu.target import Target, run_stage

Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def seconds(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that are covered by both lists of intervals. The intervals within one list must not overlap."""
    return seconds(one) + seconds(other) - seconds(union([*one, *other]))


def summary(kinds: dict[str, list[Interval]]) -> dict[str, Any]:
    merged = {name: union(found) for name, found in kinds.items() if found}
    return {
        "busy_seconds": {name: seconds(found) for name, found in merged.items()},
        "overlap": {
            f"{one}+{other}": common(merged[one], merged[other]) / min(seconds(merged[one]), seconds(merged[other]))
            for one, other in combinations(merged, 2)
        },
    }


def of_kineto(path: Path) -> dict[str, Any]:
    """Busy time and overlap from a trace file of Kineto. Copies are recognized by CUPTI's names for them."""
    kinds: dict[str, list[Interval]] = {"h2d": [], "d2h": [], "device": []}
    for row in json.loads(path.read_text())["traceEvents"]:
        if row.get("ph") != "X" or row.get("cat") not in ("gpu_memcpy", "kernel"):
            continue
        kind = "device" if row["cat"] == "kernel" else "h2d" if "HtoD" in row["name"] else "d2h"
        if row["cat"] == "kernel" or "HtoD" in row["name"] or "DtoH" in row["name"]:
            kinds[kind].append((row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6))
    return summary(kinds)


def of_ours(training: Training) -> dict[str, Any]:
    timeline = training.attachment.recorder.timeline
    kinds: dict[str, list[Interval]] = {}
    for span in timeline.spans:
        kinds.setdefault(span.lane, []).append((span.start, span.end))
    return summary(kinds)


def of_iteration(training: Training) -> dict[str, Any]:
    """The phases and the ops of an iteration, in seconds from the begin of its forward."""
    training.iteration()
    training.optimizer.wait()
    timeline = training.attachment.recorder.timeline
    start, _ = timeline.window("forward")
    return {
        "phases": [[one.phase, one.start - start, one.end - start] for one in timeline.phases],
        "ops": [
            [span.kind, span.lane, span.subgroup, span.start - start, span.end - start, span.nbytes, span.numel]
            for span in timeline.spans
        ],
    }


def stage(target: Target) -> dict[str, Any]:
    ask = Ask(side="tidegate", shape=SHAPES["toy" if target.dry else "1b"], dry=target.dry, stride=2.0)
    cap_memory(ask)
    training = build(ask)
    for _ in range(3):
        training.iteration()
    result: dict[str, Any] = {"timeline": of_iteration(training)}
    training.backward(training.forward())
    target.finish_enqueued()
    if target.dry:
        training.update()
    else:
        path = target.results / "update.trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            training.update()
            target.finish_enqueued()
        profiler.export_chrome_trace(str(path))
        result["kineto"] = of_kineto(path)
    result["ours"] = of_ours(training)
    training.close()
    return result


if __name__ == "__main__":
    run_stage(stage)
