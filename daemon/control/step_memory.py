"""Memory for the steps that ranks report: an estimate of the size of a step, and limits by leaving data out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

from tidegate.wire.step import LinkRow, PathRow, StepReport, moved_by

_STEP_BYTES: Final = 3_000
_ROW_BYTES: Final = 1_000
_STATE_BYTES: Final = 3_000
_ENTRY_BYTES: Final = 400
"""Estimated bytes of memory of a dictionary entry in a step report. `_STEP_BYTES` is the estimate for the report
itself, `_ROW_BYTES` for a row (an entry of its stalls, links or paths), `_STATE_BYTES` for the state of a path. All are
measured sizes, rounded up. Rows whose texts all have the largest allowed length take twice the estimate."""


def memory_of(step: StepReport) -> int:
    """An estimate of the memory that the step report takes, in bytes. It counts the parts, and does not read them."""
    seconds = len(step.phase_seconds) + len(step.exposed_seconds) + len(step.cpu_seconds)
    nbytes = len(step.device_memory_peak_bytes) + len(step.host_memory_bytes)
    return (
        _STEP_BYTES
        + _ROW_BYTES * (len(step.stalls) + len(step.links) + len(step.paths))
        + _STATE_BYTES * len(step.path_states)
        + _ENTRY_BYTES * (seconds + nbytes + len(step.update_params) + len(step.subgroups))
    )


def fit_into_memory(reported: Iterable[StepReport], max_bytes: int) -> list[StepReport]:
    """The steps of a rank, oldest first, reduced to at most `max_bytes` of memory; all of them if they fit.

    Otherwise the newest step is complete, or without its rows (stalls, links, paths) if it does not fit. Of the rows of
    the steps before it, only sums of bytes stay: for each link direction, and for each path and operation. If that does
    not suffice, the oldest steps are left out.
    """
    steps = list(reported)
    if not steps or sum(map(memory_of, steps)) <= max_bytes:
        return steps
    last = steps[-1] if memory_of(steps[-1]) <= max_bytes else without_rows(steps[-1])
    kept, left = list[StepReport](), max_bytes
    for step in chain([last], map(_summed, reversed(steps[:-1]))):
        left -= memory_of(step)
        if left < 0:
            break
        kept.append(step)
    return kept[::-1]


def without_rows(step: StepReport) -> StepReport:
    """The step with its figures only: without stalls, links and paths."""
    return step.model_copy(update={"stalls": (), "links": (), "paths": (), "path_states": ()})


def _summed(step: StepReport) -> StepReport:
    """The step with bytes summed in one row for each link direction, and one row for each path and operation."""
    links = moved_by(step.links, lambda row: row.direction)
    paths = moved_by(step.paths, lambda row: (row.path, row.operation))
    rows = {
        "links": tuple(
            LinkRow.model_construct(direction=name, phase="", content="", bytes=count, busy_seconds=0.0)
            for name, (count, _) in links.items()
        ),
        "paths": tuple(
            PathRow.model_construct(path=path, operation=operation, phase="", bytes=count, busy_seconds=0.0)
            for (path, operation), (count, _) in paths.items()
        ),
    }
    return without_rows(step).model_copy(update=rows)
