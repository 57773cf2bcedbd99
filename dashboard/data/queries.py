"""What the screens show of runs and ranks, read from the daemon: shared for a second among viewers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data import read_cache
from tidegate.dashboard.data.clients import reader
from tidegate.dashboard.data.read_cache import Kept
from tidegate.errors import DaemonError, NotFound
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.knobs import GenerationView, KnobsView
from tidegate.wire.run import RankView, RunView
from tidegate.wire.step import StepReport
from tidegate.wire.timeline import TimelineView

NUM_STEPS: Final = 200
OVERLAP: Final = 4
"""Steps that are read again: they tell that none is missing between those that were known and those that are new."""
TIMELINES_KEPT: Final = 64
"""Of all runs and ranks: those that were on a screen last."""
LONGEST_SECONDS: Final = 4.0
"""A timeline is read again when its rank has done another step, and after this long in any case."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What all pages about one rank of one run show, as read at `read_at`."""

    run: RunView
    rank: RankView
    steps: tuple[StepReport, ...]
    knobs: KnobsView
    generations: tuple[GenerationView, ...]
    read_at: float


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs that the daemon knows, the one heard of last first. `problem`: why the list could not be read just now."""

    runs: tuple[RunView, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Look:
    """The newest snapshot that could be had. `problem`: why it is not of this moment."""

    snapshot: Snapshot | None = None
    problem: str | None = None


_timelines: OrderedDict[tuple[str, str, int, str, int], TimelineView] = OrderedDict()
"""By daemon, run, rank, the process that it was then, and step: a run that begins again has other updates."""
_lock = threading.Lock()


def forget() -> None:
    """Drops everything that is kept, and closes the clients."""
    read_cache.forget()
    with _lock:
        _timelines.clear()


def runs(url: str) -> Runs:
    """The runs; the last known ones when the daemon is away."""
    found = _RUNS.get(url)
    return Runs(runs=found.value or (), problem=found.problem)


def look(url: str, run: str, rank: int) -> Look:
    """One rank of a run; the last snapshot when the daemon is away."""
    found = _SNAPSHOTS.get(url, (run, rank))
    return Look(snapshot=found.value, problem=found.problem)


def newest_timeline(url: str, run: str, rank: int) -> TimelineView | None:
    """The rank's; None before its first. Timelines are large: read again only when it has done another step."""
    snapshot = look(url, run, rank).snapshot
    if snapshot is None:
        return None
    return _TIMELINES.get(url, (run, rank, _whose(snapshot.rank), snapshot.rank.step)).value


def timeline(url: str, run: str, rank: int, step: int) -> TimelineView | None:
    """Of one step: what was on a screen before, or what the daemon still has; None when it is gone for good."""
    who = _process(url, run, rank)
    with _lock:
        if (seen := _timelines.get((url, run, rank, who, step))) is not None:
            _timelines.move_to_end((url, run, rank, who, step))
            return seen
    try:
        found = reader(url).timeline(run, rank, step)
    except DaemonError:
        return None
    if found is not None:
        _remember((url, run, rank, who), found)
    return found


def rates(url: str, run: str, rank: int) -> RateCard | None:
    """The rank's live rate card; None while there is none, or no daemon to ask."""
    found = _RATES.get(url, (run, rank))
    return None if found.problem else found.value


def kept_steps(url: str, run: str, rank: int) -> tuple[int, ...]:
    """Steps that can be looked back at, oldest first."""
    found = _STEPS.get(url, (run, rank))
    whose = (url, run, rank, _process(url, run, rank))
    with _lock:
        seen = {step for *of, step in _timelines if tuple(of) == whose}
    return tuple(sorted({*((not found.problem and found.value) or ()), *seen}))


def fresh_knobs(url: str, run: str) -> tuple[KnobsView, tuple[GenerationView, ...]]:
    """Knobs and generations as they are now, past every cache."""
    client = reader(url)
    return client.knobs(run), tuple(client.generations(run))


def _remember(whose: tuple[str, str, int, str], found: TimelineView) -> None:
    with _lock:
        _timelines[*whose, found.step] = found
        _timelines.move_to_end((*whose, found.step))
        while len(_timelines) > TIMELINES_KEPT:
            _timelines.popitem(last=False)


def _whose(rank: RankView) -> str:
    return f"{rank.agent} {rank.started_at}"


def _process(url: str, run: str, rank: int) -> str:
    """The process that the rank is now, or was last; empty when it was never seen."""
    snapshot = _SNAPSHOTS.last(url, (run, rank)) or look(url, run, rank).snapshot
    return _whose(snapshot.rank) if snapshot else ""


def _read_runs(client: DaemonClient, _: object) -> tuple[RunView, ...]:
    return tuple(sorted(client.runs(), key=lambda run: (-run.last_seen, run.run)))


def _read_snapshot(client: DaemonClient, key: tuple[str, int]) -> Snapshot:
    run, rank = key
    view = client.run(run)
    seen = next((r for r in view.ranks if r.rank == rank), None)
    if seen is None:
        raise NotFound(f"Run {run} has no rank {rank} any more.", 404)
    return Snapshot(
        run=view,
        rank=seen,
        steps=_steps(client, run, seen, _SNAPSHOTS.last(client.url, key)),
        knobs=client.knobs(run),
        generations=tuple(client.generations(run)),
        read_at=time.time(),
    )


def _steps(client: DaemonClient, run: str, rank: RankView, before: Snapshot | None) -> tuple[StepReport, ...]:
    """The newest NUM_STEPS. Only those are asked for that were not there before: to read a step takes 0.1 ms."""
    known = before.steps if before is not None and _whose(before.rank) == _whose(rank) else ()
    if known and known[-1].step <= rank.step < known[-1].step + NUM_STEPS:
        new = client.steps(run, rank.rank, min(NUM_STEPS, rank.step - known[-1].step + OVERLAP)).steps
        if new and new[0].step <= known[-1].step:
            return (*(step for step in known if step.step < new[0].step), *new)[-NUM_STEPS:]
    return client.steps(run, rank.rank, NUM_STEPS).steps


def _read_timeline(client: DaemonClient, key: tuple[str, int, str, int]) -> TimelineView | None:
    """The newest of the rank, as the process `who`."""
    run, rank, who, _ = key
    found = client.timeline(run, rank)
    if found is not None:
        _remember((client.url, run, rank, who), found)
    return found


def _read_rates(client: DaemonClient, key: tuple[str, int]) -> RateCard | None:
    found = client.rates(*key)
    return None if found is None else RateCard.from_dict(found.model_dump())


_RUNS: Final = Kept(_read_runs, 1.0, 8)
_SNAPSHOTS: Final = Kept(_read_snapshot, 1.0)
_TIMELINES: Final = Kept(_read_timeline, LONGEST_SECONDS, 16)
_RATES: Final = Kept(_read_rates, 10.0)
_STEPS: Final = Kept(lambda client, key: client.timelines(*key).steps, 2.0)
