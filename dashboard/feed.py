"""What the screens show, read from the daemon: shared for a second among viewers, and kept when the daemon is away."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import streamlit as st

from tidegate.client import DaemonClient, find_token
from tidegate.errors import DaemonError, NotAuthorized, NotFound
from tidegate.model.rates import RateCard
from tidegate.wire import AlertView, GenerationView, KnobsView, RankView, RunView, StepReport, TimelineView

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

NUM_STEPS = 200
TIMEOUT_SECONDS = 3.0
TIMELINES_KEPT = 64
"""Of all runs and ranks: those that were on a screen last."""
SNAPSHOTS_KEPT = 64
CLIENTS_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the page shows of one rank of one run, as read at `read_at`."""

    run: RunView
    rank: RankView
    steps: tuple[StepReport, ...]
    timeline: TimelineView | None
    knobs: KnobsView
    generations: tuple[GenerationView, ...]
    alerts: tuple[AlertView, ...]
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


_last_runs: OrderedDict[str, tuple[RunView, ...]] = OrderedDict()
_last_snapshots: OrderedDict[tuple[str, str, int], Snapshot] = OrderedDict()
_timelines: OrderedDict[tuple[str, str, int, str, int], TimelineView] = OrderedDict()
"""By daemon, run, rank, the process that it was then, and step: a run that begins again has other updates."""
_clients: OrderedDict[tuple[str, str | None], DaemonClient] = OrderedDict()
_lock = threading.Lock()


def forget() -> None:
    """Drops everything that is kept, and closes the clients."""
    st.cache_data.clear()
    with _lock:
        for client in _clients.values():
            client.close()
        for kept in (_clients, _last_runs, _last_snapshots, _timelines):
            kept.clear()


def runs(url: str) -> Runs:
    """The runs; the last known ones when the daemon is away."""
    try:
        found = _runs(url)
    except DaemonError as error:
        return Runs(runs=_last_runs.get(url, ()), problem=explain(error, url))
    _keep(_last_runs, url, found, CLIENTS_KEPT)
    return Runs(runs=found)


def look(url: str, run: str, rank: int) -> Look:
    """One rank of a run; the last snapshot when the daemon is away."""
    try:
        snapshot = _snapshot(url, run, rank)
    except DaemonError as error:
        return Look(snapshot=_last_snapshots.get((url, run, rank)), problem=explain(error, url))
    _keep(_last_snapshots, (url, run, rank), snapshot, SNAPSHOTS_KEPT)
    return Look(snapshot=snapshot)


def explain(error: DaemonError, url: str) -> str:
    """The error as a sentence for the viewer of a page."""
    if isinstance(error, NotAuthorized):
        return (
            f"The daemon at {url} does not accept this page's read token. Start the live view as the user who runs "
            "the daemon, or set TIDEGATE_READ_TOKEN."
        )
    return str(error) or f"The daemon at {url} answered with an error."


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
        _keep(_timelines, (url, run, rank, who, found.step), found, TIMELINES_KEPT)
    return found


@st.cache_data(ttl=10.0, max_entries=64, show_spinner=False)
def rates(url: str, run: str, rank: int) -> RateCard | None:
    """The rank's live rate card; None while there is none, or no daemon to ask."""
    try:
        found = reader(url).rates(run, rank)
    except DaemonError:
        return None
    return None if found is None else RateCard.from_dict(found.model_dump())


@st.cache_data(ttl=2.0, max_entries=64, show_spinner=False)
def kept_steps(url: str, run: str, rank: int) -> tuple[int, ...]:
    """Steps that can be looked back at, oldest first."""
    try:
        kept = reader(url).timelines(run, rank).steps
    except DaemonError:
        kept = ()
    whose = (url, run, rank, _process(url, run, rank))
    with _lock:
        seen = {step for *of, step in _timelines if tuple(of) == whose}
    return tuple(sorted({*kept, *seen}))


def fresh_knobs(url: str, run: str) -> tuple[KnobsView, tuple[GenerationView, ...]]:
    """Knobs and generations as they are now, past every cache."""
    client = reader(url)
    return client.knobs(run), tuple(client.generations(run))


def reader(url: str) -> DaemonClient:
    """The client that this process reads with; not to be closed."""
    return _client(url, find_token("read"))


def _client(url: str, token: str | None) -> DaemonClient:
    """The one client for an address and the token that this process reads with."""
    with _lock:
        found = _clients.get((url, token)) or DaemonClient(url, token, timeout=TIMEOUT_SECONDS)
    _keep(_clients, (url, token), found, CLIENTS_KEPT)
    return found


def _keep(among: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    """The `most` that were used last; a client that is dropped is closed when nobody has it any more."""
    with _lock:
        among[key] = value
        among.move_to_end(key)
        while len(among) > most:
            among.popitem(last=False)


def _whose(rank: RankView) -> str:
    return f"{rank.agent} {rank.started_at}"


def _process(url: str, run: str, rank: int) -> str:
    """The process that the rank is now, or was last; empty when it was never seen."""
    snapshot = _last_snapshots.get((url, run, rank)) or look(url, run, rank).snapshot
    return _whose(snapshot.rank) if snapshot else ""


@st.cache_data(ttl=1.0, max_entries=8, show_spinner=False)
def _runs(url: str) -> tuple[RunView, ...]:
    return tuple(sorted(reader(url).runs(), key=lambda run: (-run.last_seen, run.run)))


@st.cache_data(ttl=1.0, max_entries=32, show_spinner=False)
def _snapshot(url: str, run: str, rank: int) -> Snapshot:
    client = reader(url)
    view = client.run(run)
    seen = next((r for r in view.ranks if r.rank == rank), None)
    if seen is None:
        raise NotFound(f"Run {run} has no rank {rank} any more.", 404)
    return Snapshot(
        run=view,
        rank=seen,
        steps=client.steps(run, rank, NUM_STEPS).steps,
        timeline=_timeline(url, run, rank, _whose(seen), seen.step),
        knobs=client.knobs(run),
        generations=tuple(client.generations(run)),
        alerts=tuple(client.alerts(run)),
        read_at=time.time(),
    )


@st.cache_data(ttl=4.0, max_entries=16, show_spinner=False)
def _timeline(url: str, run: str, rank: int, who: str, step: int) -> TimelineView | None:
    """Timelines are large: read again only when `step` changed, or a while after."""
    found = reader(url).timeline(run, rank)
    if found is not None:
        _keep(_timelines, (url, run, rank, who, found.step), found, TIMELINES_KEPT)
    return found
