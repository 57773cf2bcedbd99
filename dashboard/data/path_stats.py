"""Figures of each storage path over the newest steps, for the table of paths. Pure: it draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.client.step_stats import WINDOW
from tidegate.wire.step import PathOperation, PathState, StepReport, moved_by


@dataclass(frozen=True, kw_only=True)
class PathUse:
    """Reads or writes of one path: means over the newest steps. `ceiling_share`: the measured speed as a share of the
    speed that the path had when nothing else used it."""

    bytes_per_step: float
    bytes_per_second: float | None
    """Speed while busy; None if nothing was transferred."""
    ceiling_share: float | None


@dataclass(frozen=True, kw_only=True)
class PathFigures:
    """One path: its subgroups, transfers and free space. `lock_wait_seconds` (waits for other processes of this node
    that use the path) and `errors` are sums since the run began."""

    name: str
    subgroups: int
    read: PathUse
    write: PathUse
    lock_wait_seconds: float
    errors: int
    free_bytes: int | None
    written_bytes_per_day: float | None


def path_figures(steps: Sequence[StepReport]) -> list[PathFigures]:
    """Figures of the newest WINDOW of `steps` (oldest first), in the order of the paths; empty without paths."""
    recent = list(steps)[-WINDOW:]
    moved = moved_by((row for step in recent for row in step.paths), lambda row: (row.path, row.operation))
    last = recent[-1] if recent else None

    def use(state: PathState, operation: PathOperation) -> PathUse:
        nbytes, seconds = moved.get((state.path, operation), (0, 0.0))
        speed = nbytes / seconds if seconds > 0 else None
        ceiling = state.ceiling_bytes_per_second.get(operation)
        return PathUse(
            bytes_per_step=nbytes / len(recent),
            bytes_per_second=speed,
            ceiling_share=speed / ceiling if speed is not None and ceiling else None,
        )

    return [
        PathFigures(
            name=state.path,
            subgroups=last.subgroups.get(state.path, 0) if last else 0,
            read=use(state, "read"),
            write=use(state, "write"),
            lock_wait_seconds=sum(state.lock_wait_seconds.values()),
            errors=sum(state.errors.values()),
            free_bytes=state.free_bytes,
            written_bytes_per_day=state.written_bytes_per_day,
        )
        for state in (last.path_states if last else ())
    ]
