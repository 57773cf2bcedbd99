"""Totals of one step over all ranks of a run: times, bytes and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tidegate.daemon.control.run import Run
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.wire.run import RunTotals
from tidegate.wire.step import StepReport


def totals(run: Run) -> RunTotals | None:
    """Totals of the newest step that all present ranks (if none is present: all ranks) have reported.

    None if there is no such step.
    """
    ranks = run.control.present & run.members.keys() or run.members.keys()
    reported = {rank: {step.step: step for step in run.members[rank].recent} for rank in ranks}
    common = set.intersection(*(set(steps) for steps in reported.values())) if reported else set()
    if not common:
        return None
    newest = max(common)
    steps = {rank: by_number[newest] for rank, by_number in reported.items()}
    figures = {rank: StepFigures.of(step) for rank, step in steps.items()}
    slowest = max(figures, key=lambda rank: (figures[rank].seconds, -rank))
    tokens = [step.tokens for step in steps.values() if step.tokens is not None]
    return RunTotals(
        step=newest,
        ranks=len(steps),
        step_seconds=figures[slowest].seconds,
        update_seconds=max(row.update_seconds or 0.0 for row in figures.values()),
        slowest_rank=slowest,
        exposed_seconds=max(row.exposed_seconds for row in figures.values()),
        tokens=sum(tokens) if tokens else None,
        link_bytes=_summed({row.direction: row.bytes} for step in steps.values() for row in step.links),
        path_bytes=_path_bytes(steps.values()),
        host_memory_bytes=_summed(step.host_memory_bytes for step in steps.values()),
        update_params=_summed(step.update_params for step in steps.values()),
    )


def _path_bytes(steps: Iterable[StepReport]) -> dict[str, dict[str, int]]:
    rows = [row for step in steps for row in step.paths]
    paths = dict.fromkeys(row.path for row in rows)
    return {path: _summed({row.operation: row.bytes} for row in rows if row.path == path) for path in paths}


def _summed(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)
