"""Steps on their way to the database, and the window of those that are compared."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from tests.daemon.live import hello, step_report
from tidegate.daemon.control import control_plane as plane_module
from tidegate.daemon.control import retention
from tidegate.daemon.control import serializers as views_of
from tidegate.daemon.control.control_plane import FLUSH_SECONDS, ControlPlane
from tidegate.daemon.control.run import Clocks, Member
from tidegate.daemon.control.step_writer import (
    SHORTEST_SWEEP_SECONDS,
    STEPS_BEFORE_CLEANING,
    SWEEP_SECONDS,
    WRITE_SECONDS,
    StepWriter,
)
from tidegate.daemon.decisions.step_window import STEPS_KEPT, StepFigures, StepWindow
from tidegate.daemon.storage import step_table
from tidegate.daemon.storage.store import Store
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport

UNKNOWN = st.none() | st.floats(0, 1e12)
FIGURES = st.builds(
    StepFigures, st.integers(0, 2**62), st.floats(0, 1e6), st.floats(0, 1e6), UNKNOWN, UNKNOWN, st.booleans()
)


@given(st.lists(FIGURES, max_size=40), st.integers(0, 2 * STEPS_KEPT))
def test_a_window_is_the_newest_of_what_it_was_given(figures: list[StepFigures], many: int) -> None:
    window, plain = StepWindow(), deque[StepFigures](maxlen=STEPS_KEPT)
    for row in [StepFigures(n, 1.0, 2.0, None, 3.0, False) for n in range(many)] + figures:
        window.add(row)
        plain.append(row)
    assert list(window) == list(plain)
    assert window.newest == (plain[-1].step if plain else -1)
    assert window.oldest == (plain[0].step if len(plain) == STEPS_KEPT else -1)


class Rank:
    """A member that tells steps, and the history that they go to."""

    def __init__(self, store: Store, keep_seconds: float = 100.0) -> None:
        self.mono, self.wall = 0.0, 1_000.0
        clock = Clocks(wall=lambda: self.wall, mono=lambda: self.mono)
        self.history = StepWriter(store.steps, keep_seconds=keep_seconds, clock=clock)
        self.member = Member(hello=hello("llama"), seen_mono=0.0, last_seen=0.0)
        self.step = 0

    def tell(self, count: int) -> None:
        steps = tuple(step_report(self.step + n + 1) for n in range(count))
        self.step += count
        report = AgentReport(
            timestamp=self.wall, step=self.step, phase="other", generation=0, effective={}, steps=steps
        )
        self.history.add(self.member, self.member.add_report(report))

    def pass_seconds(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds
        self.history.tick(self.mono)
        self.history.wait_for_write()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    yield made
    made.close()


def stored(store: Store, rank: Rank) -> int:
    return len(store.steps.newest(rank.member.hello.agent, 10_000))


def test_all_ranks_are_written_together_once_a_second(store: Store) -> None:
    rank = Rank(store)
    rank.tell(3)
    rank.pass_seconds(WRITE_SECONDS / 2)
    assert (stored(store, rank), len(asyncio.run(rank.history.newest(rank.member.hello.agent, 10)))) == (0, 3)
    rank.pass_seconds(WRITE_SECONDS / 2)
    assert (stored(store, rank), len(asyncio.run(rank.history.newest(rank.member.hello.agent, 2)))) == (3, 2)


def test_what_may_have_been_written_is_written_again(store: Store) -> None:
    """A commit that fails may have arrived."""
    rank = Rank(store)
    rank.tell(3)
    told = list(rank.history._unwritten)
    store.steps.write(told[:2])
    rank.pass_seconds(WRITE_SECONDS)
    assert [step for step, _ in store.steps.newest(rank.member.hello.agent, 10)] == [1, 2, 3]


def test_many_are_written_in_several_transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "ROWS_AT_ONCE", 4)
    begun: list[object] = []
    event.listen(store.steps._engine, "begin", begun.append)
    rank = Rank(store)
    rank.tell(10)
    rank.pass_seconds(WRITE_SECONDS)
    assert [step for step, _ in store.steps.newest(rank.member.hello.agent, 20)] == list(range(1, 11))
    assert len(begun) == 1 + 3 + 1, "the sweep, three of four rows at most, and the question"


def test_the_table_does_not_grow(store: Store) -> None:
    rank = Rank(store)
    for _ in range(100):
        rank.tell(10)
        rank.pass_seconds(WRITE_SECONDS)
    assert STEPS_KEPT <= stored(store, rank) <= STEPS_KEPT + STEPS_BEFORE_CLEANING + 10
    rank.pass_seconds(SWEEP_SECONDS)
    assert stored(store, rank) == 1, "they are older than they are kept, but for what the run ended with"


def served(rank: Rank) -> list[int]:
    """The steps that the history serves."""
    return [json.loads(body)["step"] for body in asyncio.run(rank.history.newest(rank.member.hello.agent, 256))]


@pytest.mark.parametrize("written", [True, False])
def test_steps_are_served_for_as_long_as_they_are_kept(store: Store, written: bool) -> None:
    """They are kept for 3 s. The last one stays, whether it is in the database or still in memory."""
    rank = Rank(store, keep_seconds=3.0)

    def let_pass(seconds: float) -> None:
        if written:
            rank.pass_seconds(seconds)
        else:
            rank.wall += seconds

    rank.tell(200)
    let_pass(2.0)
    rank.tell(2)
    assert len(served(rank)) == 202
    let_pass(1.5)
    assert served(rank) == [201, 202]
    let_pass(2.0)
    assert served(rank) == [202]
    rank.tell(1)
    assert served(rank) == [203]


def test_steps_that_are_kept_for_seconds_are_deleted_within_minutes(store: Store) -> None:
    rank = Rank(store, keep_seconds=3.0)
    rank.tell(200)
    rank.pass_seconds(WRITE_SECONDS)
    assert stored(store, rank) == 200
    rank.pass_seconds(SHORTEST_SWEEP_SECONDS)
    assert stored(store, rank) == 1


def test_what_nobody_can_ask_for_is_deleted_even_after_a_refusal(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that failed comes up when all is written at the end: what it held is written nevertheless."""
    rank, other = Rank(store), Rank(store)
    rank.tell(3)
    rank.history.write()
    with store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TRIGGER full BEFORE DELETE ON steps BEGIN SELECT RAISE(ABORT, 'full'); END")
    other.member.hello = hello("another")
    rank.member, before = other.member, rank.member
    rank.tell(2)
    rank.history.drop(before.hello.agent)
    rank.mono += WRITE_SECONDS
    rank.history.tick(rank.mono)
    assert rank.history._running is not None
    wait([rank.history._running[-1]])
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER full")
    rank.history.write()
    assert "steps could not be written to the database, 2 are kept" in caplog.text
    assert [step for step, _ in store.steps.newest(other.member.hello.agent, 10)] == [4, 5]
    assert store.steps.newest(before.hello.agent, 10) == []


def test_who_was_dropped_during_a_write_that_failed_stays_dropped(store: Store) -> None:
    """The write that failed was to delete only the agent's oldest steps; all of them have to go since."""
    rank = Rank(store)
    rank.tell(3)
    rank.history.write()
    with store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TRIGGER full BEFORE INSERT ON steps BEGIN SELECT RAISE(ABORT, 'full'); END")
    rank.tell(STEPS_BEFORE_CLEANING)
    rank.mono += WRITE_SECONDS
    rank.history.tick(rank.mono)
    rank.history.drop(rank.member.hello.agent)
    with pytest.raises(IntegrityError, match="full"):
        rank.history.wait_for_write()
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER full")
    rank.history.write()
    assert stored(store, rank) == 0


def test_what_a_full_disk_refuses_is_written_later(store: Store) -> None:
    rank = Rank(store)
    rank.tell(3)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TRIGGER full BEFORE INSERT ON steps BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(IntegrityError, match="full"):
        rank.pass_seconds(WRITE_SECONDS)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER full")
    rank.pass_seconds(WRITE_SECONDS / 2)
    assert stored(store, rank) == 0, "it is asked again when its second is over"
    rank.pass_seconds(WRITE_SECONDS / 2)
    assert stored(store, rank) == 3


def test_who_takes_a_rank_takes_the_place_of_its_steps(store: Store) -> None:
    plane = ControlPlane(store)
    first, second = hello("llama"), hello("llama")
    for one in (first, first, second):  # saying it again drops nothing
        plane.hello(one, Knobs(stride=2.0))
        step = plane.registry.member(one.agent)[1].window.newest + 1
        plane.report(one.agent, AgentReport(timestamp=time.time(), step=step, phase="other", generation=0,
                                            effective={}, steps=(step_report(step),)))  # fmt: skip
        if step == 1:
            plane.step_writer.write()
            assert [step for step, _ in store.steps.newest(first.agent, 9)] == [0, 1]
            plane.goodbye(first.agent)
    plane.save_all()
    assert store.steps.newest_numbers() == {second.agent: 0}


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_run_ended_with_is_known_however_many_ended_since(
    store: Store, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """Three runs ended; the newest steps of one and the last step of two are in memory."""
    for module in (plane_module, retention):
        monkeypatch.setattr(module, "GONE_RANKS_KEPT", 1)
        monkeypatch.setattr(module, "LAST_STEPS_KEPT", 2)
    now = 1_000.0
    clock = Clocks(wall=lambda: now, mono=lambda: now)
    plane = ControlPlane(store, clock=clock)
    for name in ("oldest", "older", "old"):
        one = hello(name)
        plane.hello(one, Knobs(stride=2.0))
        told = tuple(step_report(step) for step in range(1, 31))
        plane.report(one.agent, AgentReport(timestamp=now, step=30, phase="other", generation=0, effective={},
                                            steps=told, finished=True))  # fmt: skip
        now += 1.0
    plane.step_writer.write()
    if restarted:
        plane.save_all()
        plane = ControlPlane(store, clock=clock)
    else:
        now += FLUSH_SECONDS
        plane.tick()
    runs = plane.registry.runs
    assert [len(runs[name].members[0].recent) for name in ("oldest", "older", "old")] == [0, 1, 20]
    asyncio.run(plane.load_last_steps(runs["oldest"]))
    views = [views_of.run_view(run, plane.registry.states(run)) for run in runs.values()]
    assert [view.ranks[0].last_step and view.ranks[0].last_step.step for view in views] == [30, 30, 30]
    assert [view.totals and view.totals.step for view in views] == [30, 30, 30]
    plane.save_all()
