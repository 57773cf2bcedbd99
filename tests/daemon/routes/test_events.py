"""Server-sent events: as they come, and from where one left off."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.daemon.live import Agent, Daemon, hello, new_run, wait_until
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.event_ids import RESERVED, EventIds
from tidegate.daemon.control.run import Clocks
from tidegate.daemon.routes.events import KEEP_ALIVE_SECONDS
from tidegate.daemon.storage.store import Store
from tidegate.errors import NotFound
from tidegate.knobs.knobs import Knobs
from tidegate.wire.event import Event


def test_replay_and_resume(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    agent.train(1, 1.0)
    client.set_knobs(run, {"stride": 3}, wait=0)
    agent.answer()
    seen = list(itertools.islice(client.events(run, last_event_id=0), 4))
    assert [event.kind for event in seen] == ["agent", "report", "generation", "generation"]
    assert [event.id for event in seen] == sorted({event.id for event in seen})
    assert [event.data.get("state") for event in seen[2:]] == ["proposed", "committed"]
    resumed = list(itertools.islice(client.events(run, last_event_id=seen[1].id), 2))
    assert resumed == seen[2:]


def test_without_an_id_only_what_comes(daemon: Daemon) -> None:
    run, client, seen = new_run(), daemon.client(), list[Event]()
    agent = Agent(daemon, run)
    stream = client.events(run)
    reader = threading.Thread(target=lambda: seen.append(next(event for event in stream if event.kind == "report")))
    reader.start()
    said = itertools.count(1)
    # The stream begins at some time after the call: what is said before that is not in it.
    wait_until(lambda: agent.say(step=next(said)) and seen, "an event")
    reader.join(10)
    assert seen[0].data["rank"] == 0
    assert seen[0].data["step"] >= 1


def test_the_bytes_are_what_browsers_expect(daemon: Daemon) -> None:
    run = new_run()
    Agent(daemon, run)
    headers = {"Authorization": f"Bearer {daemon.tokens['read']}", "Last-Event-ID": "0"}
    with httpx.stream("GET", f"{daemon.url}/v1/runs/{run}/events", headers=headers, trust_env=False) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = list(itertools.islice(answer.iter_lines(), 5))
    assert [line.partition(":")[0] for line in lines] == ["", "", "id", "event", "data"]


def test_a_stream_ends_with_its_token(daemon: Daemon) -> None:
    run, store = new_run(), daemon.app.state.plane.store
    agent = Agent(daemon, run)
    daemon.tokens["guest"] = token = store.tokens.issue("read", "guest")
    (made,) = (known for known in store.tokens.all() if known.name == "guest")
    wait_until(lambda: daemon.http("GET", "/v1/runs", "guest").status_code == 200, "the new token")
    headers = {"Authorization": f"Bearer {token}"}
    address = f"{daemon.url}/v1/runs/{run}/events"
    with httpx.stream("GET", address, headers=headers, timeout=60.0, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": welcome"
        store.tokens.revoke(made.id)
        wait_until(lambda: daemon.http("GET", "/v1/runs", "guest").status_code == 401, "the end of the token")
        agent.say(step=1)
        agent.say(step=2)
        assert sum(line.startswith("event:") for line in lines) <= 2, "it ends"


def test_a_stream_without_events_ends_with_its_token(daemon: Daemon) -> None:
    run, store = new_run(), daemon.app.state.plane.store
    Agent(daemon, run)
    daemon.tokens["passing"] = token = store.tokens.issue("read", "passing")
    (made,) = (known for known in store.tokens.all() if known.name == "passing")
    wait_until(lambda: daemon.http("GET", "/v1/runs", "passing").status_code == 200, "the new token")
    address, headers = f"{daemon.url}/v1/runs/{run}/events", {"Authorization": f"Bearer {token}"}
    with httpx.stream("GET", address, headers=headers, timeout=60.0, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": welcome"
        store.tokens.revoke(made.id)
        begin = time.monotonic()
        assert sum(line.startswith("event:") for line in lines) == 0
    assert time.monotonic() - begin < KEEP_ALIVE_SECONDS - 1.0, "sooner than its next sign of life"


@pytest.mark.parametrize("wall", [1e9, -1.0, 5e9])
def test_ids_grow_over_restarts_whatever_the_clock_says(tmp_path: Path, wall: float) -> None:
    """Whoever resumes at the newest id that it has seen misses nothing."""
    seen: list[int] = []
    for at in (2e9, wall, wall):
        store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
        plane = ControlPlane(store, clock=Clocks(wall=lambda at=at: at))  # type: ignore[misc]
        plane.hello(hello("llama"), Knobs())
        seen += [event.id for event in plane.registry.runs["llama"].events]
        store.close()
    assert len(seen) >= 3
    assert seen == sorted(set(seen))


def test_ids_are_reserved_in_good_time_and_never_given_twice(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    ids, seen = EventIds(store), list[int]()
    for _ in range(5):
        seen += [ids.take() for _ in range(RESERVED // 3)]
        ids.refill()
    assert seen == sorted(set(seen))
    assert EventIds(store).take() > seen[-1]
    store.close()


def test_no_such_run(daemon: Daemon) -> None:
    with pytest.raises(NotFound, match="There is no run"):
        next(daemon.client().events("nowhere"))
