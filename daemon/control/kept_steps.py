"""What the steps that a rank told take in memory, and what is left out of them where it is too much."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Final, TypeVar

from tidegate.wire.step import LinkRow, PathRow, StepReport

_STEP_BYTES: Final = 3_000
_ROW_BYTES: Final = 1_000
_STATE_BYTES: Final = 3_000
_ENTRY_BYTES: Final = 400
"""As measured, and some more. Rows of a step whose texts are all as long as they may be take twice as much."""
_Key = TypeVar("_Key", bound=Hashable)


def memory_of(step: StepReport) -> int:
    """About how many bytes of memory the step takes, found without looking at its rows."""
    seconds = len(step.phase_seconds) + len(step.exposed_seconds) + len(step.cpu_seconds)
    nbytes = len(step.device_memory_peak_bytes) + len(step.host_memory_bytes)
    return (
        _STEP_BYTES
        + _ROW_BYTES * (len(step.stalls) + len(step.links) + len(step.paths))
        + _STATE_BYTES * len(step.path_states)
        + _ENTRY_BYTES * (seconds + nbytes + len(step.update_params) + len(step.subgroups))
    )


def fit_into_memory(told: Iterable[StepReport], room: int) -> list[StepReport]:
    """What is kept of a rank's steps, oldest first, in `room` bytes of memory: all of them where they fit.

    Else the newest is kept as it was told, or without its rows where it does not fit. Of those before it rows are put
    together, as `step_totals` does, and the oldest go.
    """
    steps = list(told)
    if not steps or sum(map(memory_of, steps)) <= room:
        return steps
    last = steps[-1] if memory_of(steps[-1]) <= room else without_rows(steps[-1])
    kept, left = list[StepReport](), room
    for step in chain([last], map(_summed, reversed(steps[:-1]))):
        left -= memory_of(step)
        if left < 0:
            break
        kept.append(step)
    return kept[::-1]


def without_rows(step: StepReport) -> StepReport:
    """Its figures only."""
    return step.model_copy(update={"stalls": (), "links": (), "paths": (), "path_states": ()})


def _summed(step: StepReport) -> StepReport:
    """One row for each direction, and one for each path and operation."""
    links = _bytes_by((row.direction, row.bytes) for row in step.links)
    paths = _bytes_by(((row.path, row.operation), row.bytes) for row in step.paths)
    rows = {
        "links": tuple(
            LinkRow.model_construct(direction=name, phase="", content="", bytes=count, busy_seconds=0.0)
            for name, count in links.items()
        ),
        "paths": tuple(
            PathRow.model_construct(path=path, operation=operation, phase="", bytes=count, busy_seconds=0.0)
            for (path, operation), count in paths.items()
        ),
    }
    return without_rows(step).model_copy(update=rows)


def _bytes_by(rows: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    found = dict[_Key, int]()
    for key, count in rows:
        found[key] = found.get(key, 0) + count
    return found
