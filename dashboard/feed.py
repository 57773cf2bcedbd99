"""What the screens show, read from the daemon: shared for a second among viewers, and kept when the daemon is away."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import streamlit as st

from tidegate.client import DaemonClient, find_token
from tidegate.errors import DaemonError, NotAuthorized, NotFound
from tidegate.wire import AlertView, GenerationView, KnobsView, RankView, RunView, StepReport, TimelineView

NUM_STEPS = 200
TIMEOUT_SECONDS = 3.0


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
_clients: dict[tuple[str, str | None], DaemonClient] = {}
_lock = threading.Lock()


def forget() -> None:
    """Drops everything that is kept, and closes the clients."""
    st.cache_data.clear()
    with _lock:
        for client in _clients.values():
            client.close()
        for kept in (_clients, _last_runs, _last_snapshots):
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
    return reader(url).timeline(run, rank)
