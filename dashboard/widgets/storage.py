"""Table of a run's storage paths: subgroups, transfers, and speed compared with the path's own highest speed."""

from __future__ import annotations

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import StepSummary
from tidegate.dashboard.data.path_stats import PathFigures, PathUse, path_figures
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.style import markup, palette

COLUMNS = (
    "path", "state on it", "read a step", "of its ceiling", "written a step", "of its ceiling", "lock wait", "errors",
    "free", "written a day",
)  # fmt: skip


def paths(snapshot: Snapshot, figures: StepSummary) -> None:
    """Draws a row for each path; nothing for a run without paths."""
    found = path_figures(snapshot.steps)
    if not found:
        return
    total = sum(snapshot.steps[-1].subgroups.values())
    st.html(
        markup.title("Storage paths", f"means of {figures.step_count_text}; waits and errors since the run began")
        + markup.table(COLUMNS, [_row(path, total) for path in found])
    )


def _row(path: PathFigures, total: int) -> tuple[str, ...]:
    held = f"{path.subgroups} of {total}"
    return (
        markup.dot(path.name, palette.residence(path.name)),
        markup.bar(path.subgroups / total, held, palette.residence(path.name)) if total else held,
        units.nbytes(path.read.bytes_per_step),
        speed(path.read, f"{path.name}:read"),
        units.nbytes(path.write.bytes_per_step),
        speed(path.write, f"{path.name}:write"),
        units.seconds(path.lock_wait_seconds),
        str(path.errors),
        units.nbytes(path.free_bytes),
        units.nbytes(path.written_bytes_per_day),
    )


def speed(use: PathUse, lane: str) -> str:
    """A bar, as HTML, for the read or write speed of a path while it is busy. The bar shows the speed as a share of the
    path's ceiling: the speed that was measured at the start of the run, when the path was used alone.

    The share can exceed 100 %, because the measurement can be too low: many small files, a cache in the drive, or other
    users of the drive at that time. Such values are shown as "over 100 %". If the speed or
    the ceiling is unknown, the result has no bar.
    """
    if use.bytes_per_second is None or use.ceiling_share is None:
        return units.rate(use.bytes_per_second)
    share = units.share(use.ceiling_share) if use.ceiling_share <= 1 else "over 100 %"
    return markup.bar(use.ceiling_share, f"{share}, {units.rate(use.bytes_per_second)}", palette.lane(lane))
