"""What the screens show, read from the daemon: shared for a second among viewers, and kept when the daemon is away."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from tidegate.client import DaemonClient, find_token
from tidegate.errors import DaemonError, NotAuthorized, NotFound
from tidegate.model.rates import RateCard
from tidegate.wire import Advice, AlertView, GenerationView, KnobsView, RankView, RunView, StepReport, TimelineView

NUM_STEPS = 200
TIMEOUT_SECONDS = 3.0
TIMELINES_KEPT = 64
"""Of all runs and ranks: those that were on a screen last."""


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


_last_runs: dict[str, tuple[RunView, ...]] = {}
_last_snapshots: dict[tuple[str, str, int], Snapshot] = {}
_timelines: OrderedDict[tuple[str, str, int, int], TimelineView] = OrderedDict()
_clients: dict[tuple[str, str | None], DaemonClient] = {}
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
    with _lock:
        _last_runs[url] = found
    return Runs(runs=found)


def look(url: str, run: str, rank: int) -> Look:
    """One rank of a run; the last snapshot when the daemon is away."""
    try:
        snapshot = _snapshot(url, run, rank)
    except DaemonError as error:
        return Look(snapshot=_last_snapshots.get((url, run, rank)), problem=explain(error, url))
    with _lock:
        _last_snapshots[url, run, rank] = snapshot
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
    if (seen := _timelines.get((url, run, rank, step))) is not None:
        return seen
    try:
        found = reader(url).timeline(run, rank, step)
    except DaemonError:
        return None
    if found is not None:
        _see(url, run, rank, found)
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
    seen = (step for at, of, who, step in list(_timelines) if (at, of, who) == (url, run, rank))
    return tuple(sorted({*kept, *seen}))


def alerts(url: str, runs: Sequence[str]) -> dict[str, tuple[AlertView, ...]]:
    """What fires in each of these runs, as far as the daemon answers: one that hangs is not asked again and again."""
    found = {}
    try:
        for run in runs:
            found[run] = _alerts(url, run)
    except DaemonError:
        pass
    return found


@st.cache_data(ttl=5.0, max_entries=256, show_spinner=False)
def _alerts(url: str, run: str) -> tuple[AlertView, ...]:
    return tuple(reader(url).alerts(run))


@st.cache_data(ttl=20.0, max_entries=64, show_spinner=False)
def advice(url: str, run: str) -> Advice | None:
    """What the model would turn; None when the daemon cannot be asked. It thinks for a moment: the last answer is kept
    for a while."""
    try:
        return reader(url).advice(run)
    except DaemonError:
        return None


def _see(url: str, run: str, rank: int, view: TimelineView) -> None:
    with _lock:
        _timelines[url, run, rank, view.step] = view
        while len(_timelines) > TIMELINES_KEPT:
            _timelines.popitem(last=False)


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
        if (url, token) not in _clients:
            _clients[url, token] = DaemonClient(url, token, timeout=TIMEOUT_SECONDS)
        return _clients[url, token]


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
        timeline=_timeline(url, run, rank, seen.step),
        knobs=client.knobs(run),
        generations=tuple(client.generations(run)),
        alerts=tuple(client.alerts(run)),
        read_at=time.time(),
    )


@st.cache_data(ttl=4.0, max_entries=16, show_spinner=False)
def _timeline(url: str, run: str, rank: int, step: int) -> TimelineView | None:
    """Timelines are large: read again only when `step` changed, or a while after."""
    found = reader(url).timeline(run, rank)
    if found is not None:
        _see(url, run, rank, found)
    return found
