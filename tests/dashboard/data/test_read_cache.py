"""What is read from the daemon: how often, how much of it, and what is kept when there is no answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cachetools import LRUCache, cached

from tests.dashboard import caches
from tests.dashboard.scripted import Agent, Daemon
from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data import clients, queries
from tidegate.dashboard.data.read_cache import CachedQuery
from tidegate.errors import DaemonUnreachable
from tidegate.wire.run import StepsView

URL = "http://127.0.0.1:9"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps the daemon was asked for, each time."""
    asked: list[int] = []
    read = DaemonClient.steps

    def counted(self: DaemonClient, run: str, rank: int, limit: int = 200) -> StepsView:
        asked.append(limit)
        return read(self, run, rank, limit)

    monkeypatch.setattr(DaemonClient, "steps", counted)
    return asked


def numbers(daemon: Daemon) -> list[int]:
    caches.expire()
    look = queries.snapshot_reading(daemon.url, "llama-7b", 0)
    assert look.value is not None
    return [step.step for step in look.value.steps]


def test_only_new_steps_are_asked_for(daemon: Daemon, limits: list[int]) -> None:
    agent = Agent(daemon)
    agent.train(250)
    assert numbers(daemon) == list(range(51, 251))
    agent.train(3)
    assert numbers(daemon) == list(range(54, 254))
    assert numbers(daemon) == list(range(54, 254))
    assert limits == [queries.NUM_STEPS, 3 + queries.OVERLAP, queries.OVERLAP]
    with daemon.operator() as client:
        snapshot = queries.snapshot_reading(daemon.url, "llama-7b", 0).value
        assert snapshot is not None
        assert snapshot.steps == client.steps("llama-7b", 0, queries.NUM_STEPS).steps


def test_steps_of_a_run_that_begins_again_are_read_anew(daemon: Daemon, limits: list[int]) -> None:
    agent = Agent(daemon)
    agent.train(20)
    assert numbers(daemon)[-1] == 20
    agent.finish()
    begun_again = Agent(daemon, process="b", step=18)  # from its last checkpoint
    begun_again.train(4)
    assert numbers(daemon) == [19, 20, 21, 22], "the steps of now, and no others"
    assert limits == [queries.NUM_STEPS] * 2


def test_more_steps_than_are_shown_leave_no_gap(daemon: Daemon) -> None:
    agent = Agent(daemon)
    agent.train(5)
    numbers(daemon)
    agent.train(queries.NUM_STEPS + 20)
    assert numbers(daemon) == list(range(26, 226))


def test_viewers_who_want_the_same_at_once_ask_once() -> None:
    asked, everybody = [], threading.Barrier(8)

    def read(_: DaemonClient, key: object) -> int:
        asked.append(key)
        threading.Event().wait(0.05)  # the others come meanwhile
        return len(asked)

    kind = CachedQuery(read, 60.0)

    def want(_: int) -> int | None:
        everybody.wait(10)
        return kind.get(URL, "a").value

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(want, range(8))) == [1] * 8
    assert asked == ["a"]
    caches.expire(kind)
    assert kind.get(URL, "a").value == 2


def test_the_last_value_is_kept_while_there_is_no_answer() -> None:
    answers: list[int | None] = [1, None, 3]

    def read(*_: object) -> int:
        if (answer := answers.pop(0)) is None:
            raise DaemonUnreachable("It is away.")
        return answer

    kind = CachedQuery(read, 60.0)
    assert kind.get(URL).value == 1
    caches.expire(kind)
    away = kind.get(URL)
    assert (away.value, away.problem) == (1, "It is away.")
    assert kind.get(URL) is away, "nor is it asked again and again"
    caches.expire(kind)
    assert (kind.get(URL).value, kind.get(URL).problem) == (3, None)
    assert kind.last(URL) == 3


def test_what_was_wanted_longest_ago_goes_first() -> None:
    kind = CachedQuery(lambda _, key: key, 60.0, most=2)
    for key in ("a", "b", "a", "c"):
        kind.get(URL, key)
    assert [kind.last(URL, key) for key in ("a", "b", "c")] == ["a", None, "c"]


def test_one_client_for_each_daemon_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_client", cached(LRUCache(2))(clients._client.__wrapped__))
    first = clients.shared_client("http://127.0.0.1:1")
    assert clients.shared_client("http://127.0.0.1:1") is first
    for port in (2, 3):
        clients.shared_client(f"http://127.0.0.1:{port}")
    assert clients.shared_client("http://127.0.0.1:1") is not first
