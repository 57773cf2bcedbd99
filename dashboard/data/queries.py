"""Queries of the pages to the daemon: runs, snapshots of a rank, timelines and rates, cached for all viewers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from cachetools import LRUCache

from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data.clients import shared_client
from tidegate.dashboard.data.read_cache import CachedQuery, Reading
from tidegate.errors import DaemonError, NotFound
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.knobs import GenerationView, KnobsView
from tidegate.wire.run import RankView, RunView
from tidegate.wire.step import StepReport
from tidegate.wire.timeline import TimelineView

NUM_STEPS: Final = 200
OVERLAP: Final = 4
"""Number of known steps that are read again together with new steps, to detect gaps between them."""
TIMELINES_KEPT: Final = 64
"""Largest number of timelines in memory, for all runs and ranks; the least recently shown is dropped."""
LONGEST_SECONDS: Final = 4.0
"""Longest time in seconds for which the cached newest timeline of a rank is used. It is read again earlier if the rank
has finished another step."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Data of one rank of one run for all pages, read at `read_at` (seconds since the epoch)."""

    run: RunView
    rank: RankView
    steps: tuple[StepReport, ...]
    knobs: KnobsView
    generations: tuple[GenerationView, ...]
    read_at: float


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of the daemon, the run with the latest message first. `refused`: sentences on agents that the daemon
    refuses. `problem`: why the list is not up to date."""

    runs: tuple[RunView, ...] = ()
    refused: tuple[str, ...] = ()
    problem: str | None = None


_timelines: LRUCache[tuple[str, str, int, str, int], TimelineView] = LRUCache(TIMELINES_KEPT)
"""Timelines by daemon, run, rank, process of the rank, and step. The process is in the key, because a restarted run can
have a different update with the same step number."""
_lock = threading.Lock()


def runs(url: str) -> Runs:
    """The runs; the last known runs if the daemon cannot be reached."""
    reading = _RUNS.get(url)
    return replace(reading.value or Runs(), problem=reading.problem)


def snapshot_reading(url: str, run: str, rank: int) -> Reading[Snapshot]:
    """The snapshot of one rank; the last one if the daemon cannot be reached."""
    return _SNAPSHOTS.get(url, (run, rank))


def newest_timeline(url: str, run: str, rank: int) -> TimelineView | None:
    """The rank's newest timeline; None before the first one. As timelines are large, it is read again only after a new
    step, or after `LONGEST_SECONDS`."""
    snapshot = snapshot_reading(url, run, rank).value
    if snapshot is None:
        return None
    return _TIMELINES.get(url, (run, rank, _whose(snapshot.rank), snapshot.rank.step)).value


def timeline(url: str, run: str, rank: int, step: int) -> TimelineView | None:
    """The timeline of one step, from memory or from the daemon; None if it is no longer stored."""
    who = _process(url, run, rank)
    with _lock:
        if (seen := _timelines.get((url, run, rank, who, step))) is not None:
            return seen
    try:
        found = shared_client(url).timeline(run, rank, step)
    except DaemonError:
        return None
    if found is not None:
        _remember((url, run, rank, who), found)
    return found


def rates(url: str, run: str, rank: int) -> RateCard | None:
    """The rank's rate card with the speeds measured during training; None if there is none yet, or the daemon cannot be
    reached."""
    reading = _RATES.get(url, (run, rank))
    return None if reading.problem else reading.value


def kept_steps(url: str, run: str, rank: int) -> tuple[int, ...]:
    """Numbers of the steps whose timeline the daemon or this process still has, in ascending order."""
    reading = _STEPS.get(url, (run, rank))
    whose = (url, run, rank, _process(url, run, rank))
    with _lock:
        seen = {step for *of, step in _timelines if tuple(of) == whose}
    return tuple(sorted({*((not reading.problem and reading.value) or ()), *seen}))


def fresh_knobs(url: str, run: str) -> tuple[KnobsView, tuple[GenerationView, ...]]:
    """The present knobs and generations, read without a cache."""
    client = shared_client(url)
    return client.knobs(run), tuple(client.generations(run))


def _remember(whose: tuple[str, str, int, str], found: TimelineView) -> None:
    with _lock:
        _timelines[*whose, found.step] = found


def _whose(rank: RankView) -> str:
    """A text that identifies the process of the rank: the id of its agent and the time of its start."""
    return f"{rank.agent} {rank.started_at}"


def _process(url: str, run: str, rank: int) -> str:
    """A text that identifies the present or last process of the rank; empty if the rank was never read."""
    snapshot = _SNAPSHOTS.last(url, (run, rank)) or snapshot_reading(url, run, rank).value
    return _whose(snapshot.rank) if snapshot else ""


def _read_runs(client: DaemonClient, _: object) -> Runs:
    return Runs(
        runs=tuple(sorted(client.runs(), key=lambda run: (-run.last_seen, run.run))),
        refused=tuple(agents.sentence for agents in client.refused_agents()),
    )


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
    """The newest NUM_STEPS steps. If `before` has some of them, only new steps and OVERLAP known ones are requested, to
    save time: each step takes 0.1 ms to read."""
    known = before.steps if before is not None and _whose(before.rank) == _whose(rank) else ()
    if known and known[-1].step <= rank.step < known[-1].step + NUM_STEPS:
        new = client.steps(run, rank.rank, min(NUM_STEPS, rank.step - known[-1].step + OVERLAP)).steps
        if new and new[0].step <= known[-1].step:
            return (*(step for step in known if step.step < new[0].step), *new)[-NUM_STEPS:]
    return client.steps(run, rank.rank, NUM_STEPS).steps


def _read_timeline(client: DaemonClient, key: tuple[str, int, str, int]) -> TimelineView | None:
    """Reads the rank's newest timeline from the daemon, and also stores it in `_timelines`. key: run, rank, text that
    identifies the process of the rank, and the rank's newest step (which is not used here)."""
    run, rank, who, _ = key
    found = client.timeline(run, rank)
    if found is not None:
        _remember((client.url, run, rank, who), found)
    return found


def _read_rates(client: DaemonClient, key: tuple[str, int]) -> RateCard | None:
    found = client.rates(*key)
    return None if found is None else RateCard.from_dict(found.model_dump())


_RUNS: Final = CachedQuery(_read_runs, 1.0, 8)
_SNAPSHOTS: Final = CachedQuery(_read_snapshot, 1.0)
_TIMELINES: Final = CachedQuery(_read_timeline, LONGEST_SECONDS, 16)
_RATES: Final = CachedQuery(_read_rates, 10.0)
_STEPS: Final = CachedQuery(lambda client, key: client.timelines(*key).steps, 2.0)
