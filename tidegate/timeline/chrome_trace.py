"""Export of timelines as a Chrome trace: a JSON file for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format", Google, 2016. Times are microseconds. Each rank has one process for measured and one for
simulated timelines; each lane is a thread.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tidegate.plan.ops import LANES
from tidegate.timeline.stall_analysis import Interval, stalls
from tidegate.timeline.timeline import Source, Span, Timeline

Event = dict[str, Any]

SIMULATED_PID_OFFSET: Final = 1_000_000
"""Added to the rank to get the process id of its simulated timelines; ranks are smaller than this."""
PHASE_ROW: Final = "phases"
STALL_ROW: Final = "stalls"


def chrome_trace(timelines: Sequence[Timeline], *, rank: int, process_name: str) -> dict[str, Any]:
    """The trace of one rank. Measured and simulated timelines are shown as two processes, one below the other.

    Measured timelines are placed by their wall-clock time, the first at 0. A simulated timeline starts with the
    measured timeline of the same step; simulated timelines without a measured one follow each other from 0.
    """
    events: list[Event] = []
    flow_ids = itertools.count(1)
    offsets = _offsets(timelines)
    for source, pid, name in _processes(rank, process_name):
        chosen = [(t, offset) for t, offset in zip(timelines, offsets, strict=True) if t.source == source]
        if not chosen:
            continue
        tids = _tids([timeline for timeline, _ in chosen])
        events += _metadata(pid, name, tids)
        for timeline, offset in chosen:
            events += _slices(timeline, pid, tids, offset)
            events += _flows(timeline, pid, tids, offset, flow_ids)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"rank": rank}}


def write_trace(path: str | Path, timelines: Sequence[Timeline], *, rank: int, process_name: str) -> Path:
    """Writes the trace to `path`, compressed when the name ends in `.gz`. Returns the path."""
    path = Path(path)
    text = json.dumps(chrome_trace(timelines, rank=rank, process_name=process_name), allow_nan=False)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _processes(rank: int, process_name: str) -> tuple[tuple[Source, int, str], ...]:
    return (
        ("measured", rank, process_name),
        ("simulated", rank + SIMULATED_PID_OFFSET, f"{process_name} (simulated)"),
    )


def _offsets(timelines: Sequence[Timeline]) -> list[float]:
    """Seconds to add to the times of each timeline, in the order of `timelines`."""
    measured = [timeline for timeline in timelines if timeline.source == "measured"]
    first = min((timeline.origin for timeline in measured), default=0.0)
    by_step = {timeline.step: timeline.origin - first for timeline in measured}
    offsets: list[float] = []
    cursor = 0.0
    for timeline in timelines:
        if timeline.source == "measured":
            offsets.append(timeline.origin - first)
        elif timeline.step in by_step:
            offsets.append(by_step[timeline.step])
        else:
            offsets.append(cursor)
            cursor += max([0.0, *(span.end for span in timeline.spans), *(phase.end for phase in timeline.phases)])
    return offsets


def _tids(timelines: Sequence[Timeline]) -> dict[str, int]:
    """The thread id of each row of the trace, by name of the row: phases, stalls, and one row for each lane. Rows are
    shown in the order of their ids."""
    used = {span.lane for timeline in timelines for span in timeline.spans}
    lanes = [lane for lane in LANES if lane in used] + sorted(used - set(LANES))
    return {row: i for i, row in enumerate([PHASE_ROW, STALL_ROW, *lanes], start=1)}


def _metadata(pid: int, name: str, tids: dict[str, int]) -> Iterator[Event]:
    yield _meta("process_name", pid, 0, name=name)
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    for row, tid in tids.items():
        yield _meta("thread_name", pid, tid, name=row)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(event: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _slices(timeline: Timeline, pid: int, tids: dict[str, int], offset: float) -> Iterator[Event]:
    for phase in timeline.phases:
        args = {"step": timeline.step}
        yield _slice(phase.phase, "phase", phase, pid, tids[PHASE_ROW], offset, args)
    for stall in stalls(timeline):
        args = {"step": timeline.step}
        yield _slice(f"waits for {stall.cause}", "stall", stall, pid, tids[STALL_ROW], offset, args)
    for span in timeline.spans:
        name = span.kind.value if span.subgroup < 0 else f"{span.kind.value} {span.subgroup}"
        yield _slice(name, span.kind.value, span, pid, tids[span.lane], offset, _args(timeline.step, span))


def _slice(
    name: str, category: str, interval: Interval, pid: int, tid: int, offset: float, args: dict[str, Any]
) -> Event:
    start, end = _nanoseconds(interval.start + offset), _nanoseconds(interval.end + offset)
    # The length is the difference of the rounded ends: rounded on its own it could reach into the next slice.
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _args(step: int, span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {"step": step, "op": span.op, "subgroup": span.subgroup}
    if span.slot is not None:
        args["slot"] = span.slot
    if span.nbytes:
        args |= {"bytes": span.nbytes, "content": span.content}
        args |= {"GB/s": round(span.nbytes / span.seconds / 1e9, 3)} if span.seconds > 0 else {}
    if span.numel:
        args["params"] = span.numel
    return args


def _flows(
    timeline: Timeline, pid: int, tids: dict[str, int], offset: float, flow_ids: Iterator[int]
) -> Iterator[Event]:
    """An arrow for each dependency, from the last run of the awaited op to the first run of the waiting op."""
    last = {span.op: span for span in timeline.spans}
    first = {span.op: span for span in reversed(timeline.spans)}
    for op, deps in timeline.deps.items():
        for dep in deps:
            if op not in first or dep not in last:
                continue
            flow = {"name": "waits for", "cat": "dependency", "id": next(flow_ids), "pid": pid}
            # From the middle of the slice: at its end a slice no longer holds the arrow.
            middle = _nanoseconds((last[dep].start + last[dep].end) / 2 + offset) / 1000
            start = _nanoseconds(first[op].start + offset) / 1000
            yield {"ph": "s", "tid": tids[last[dep].lane], "ts": middle, **flow}
            yield {"ph": "f", "bp": "e", "tid": tids[first[op].lane], "ts": start, **flow}
