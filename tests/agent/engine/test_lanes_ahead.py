"""Lanes that begin an op before the last one has ended: in which order, what they show, and what may go wrong."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.agent.engine.test_executor import subgroups
from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.clock import MonotonicClock
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_progress import IssuedOp
from tidegate.errors import LaneStuckError
from tidegate.plan import Placement, Plan, make_plan
from tidegate.plan.ops import Op, OpKind, path_lanes
from tidegate.timeline.timeline import Span

READ, WRITE = path_lanes("nvme")
LONG = 20.0
"""Seconds after which a test that waits has failed."""


def plan_of(count: int, host_slots: int = 4, policy: str = "interleaved") -> Plan:
    placements = [Placement("cpu", "nvme", "nvme", False)] * count
    return make_plan(subgroups([5] * count), placements, num_slots=0, policy=policy, host_slots={"nvme": host_slots})  # type: ignore[arg-type]


@dataclass
class Runner:
    """Says at once that an op has begun, if it is to say so, then does what `on` says."""

    on: Callable[[Op], None] = lambda op: None
    says_begun: bool = True
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    at_once: Counter[str] = field(default_factory=Counter)
    most_at_once: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, lane: str, event: Event) -> None:
        event.wait()

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        with self.lock:
            self.began.append(short(op))
            self.at_once[op.lane] += 1
            self.most_at_once[op.lane] = max(self.most_at_once[op.lane], self.at_once[op.lane])
        if self.says_begun:
            begun()
        try:
            self.on(op)
        finally:
            with self.lock:
                self.at_once[op.lane] -= 1
                self.ended.append(short(op))
        return IssuedOp(DoneEvent(*self.times.get(short(op), (0.0, 0.0))), op.nbytes, op.numel)


def short(op: Op) -> str:
    return f"{op.kind} {op.subgroup}"


@contextmanager
def running(runner: Runner, plan: Plan, watchdog_seconds: float = 60.0) -> Iterator[Executor]:
    executor = Executor(
        runner, MonotonicClock(), lanes=plan.lane_names, ahead=(READ, WRITE), watchdog_seconds=watchdog_seconds
    )
    executor.start(plan)
    try:
        yield executor
    finally:
        executor.close()


def finished(runner: Runner, plan: Plan) -> tuple[Span, ...]:
    with running(runner, plan) as executor:
        executor.step()
        return executor.finish()[0]


def of_lane(spans: tuple[Span, ...], lane: str) -> list[Span]:
    return [span for span in spans if span.lane == lane]


def test_the_next_fetch_begins_before_the_last_one_has_ended() -> None:
    second = threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 0":
            assert second.wait(LONG), "the next fetch waits for this one"
        if short(op) == "fetch 1":
            second.set()

    runner = Runner(on)
    finished(runner, plan_of(4))
    assert runner.most_at_once[READ] == 2
    assert runner.most_at_once["cpu"] == 1


@pytest.mark.parametrize("lane", [READ, WRITE])
def test_ops_of_a_lane_begin_in_order(lane: str) -> None:
    runner, plan = Runner(), plan_of(30)
    finished(runner, plan)
    names = [short(op) for op in plan.lanes[lane]]
    assert [name for name in runner.began if name in names] == names


def test_what_has_not_said_that_it_has_begun_is_alone() -> None:
    second = threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 0":
            second.wait(0.1)
        if short(op) == "fetch 1":
            second.set()

    runner = Runner(on, says_begun=False)
    finished(runner, plan_of(30))
    assert runner.most_at_once[READ] == runner.most_at_once[WRITE] == 1


def test_one_op_at_a_time_where_the_plan_says_so() -> None:
    runner, plan = Runner(), plan_of(8, policy="sequential")
    finished(runner, plan)
    assert runner.began == runner.ended == [short(op) for op in plan.ops]


def test_a_fetch_waits_for_its_slot_whatever_its_lane_could_do() -> None:
    runner = Runner()
    finished(runner, plan_of(6, host_slots=1))
    for subgroup in range(1, 6):
        assert runner.began.index(f"fetch {subgroup}") > runner.ended.index(f"flush {subgroup - 1}")


def test_what_ends_early_counts_as_running_until_those_before_it_have_ended() -> None:
    """Plans leave out what the order of a lane implies: whoever waits for the second fetch waits for the first."""
    second = threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 0":
            assert second.wait(LONG)
            assert not early.wait(0.05), "the second fetch ended before the first"
        if short(op) == "fetch 1":
            second.set()

    early = threading.Event()
    plan = plan_of(3)
    runner = Runner(on)
    fetches = [op.id for op in plan.lanes[READ]]
    with running(runner, plan) as executor:
        executor.step()

        def watch() -> None:
            executor.wait_until_issued(fetches[1:2])
            if "fetch 0" not in runner.ended:
                early.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        spans, _ = executor.finish()
        watcher.join(LONG)
    assert [span.op for span in of_lane(spans, READ)] == fetches


def test_spans_of_a_lane_do_not_overlap_and_cover_the_same_time() -> None:
    times = {"fetch 0": (1.0, 3.0), "fetch 1": (2.5, 5.0), "fetch 2": (2.7, 4.9), "fetch 3": (6.0, 7.0)}
    spans = of_lane(finished(Runner(times=times), plan_of(4)), READ)
    assert [(span.start, span.end) for span in spans] == [(1.0, 3.0), (3.0, 5.0), (5.0, 5.0), (6.0, 7.0)]


@pytest.mark.parametrize("failing", ["fetch 0", "fetch 1"])
def test_an_error_waits_for_what_is_in_flight(failing: str) -> None:
    """Memory is given back when `finish` raises: nothing may work on it then."""
    both = threading.Barrier(2)
    never = threading.Event()

    def on(op: Op) -> None:
        if short(op) in ("fetch 0", "fetch 1"):
            both.wait(LONG)
            if short(op) == failing:
                raise ValueError("broken disk")
            never.wait(0.1)

    runner = Runner(on)
    with running(runner, plan_of(4)) as executor:
        executor.step()
        with pytest.raises(ValueError, match="broken disk"):
            executor.finish()
        assert {"fetch 0", "fetch 1"} <= set(runner.ended)
        assert not executor.busy
        runner.on = lambda op: None
        executor.start(plan_of(2))
        executor.cancel()


def test_of_two_errors_the_first_in_the_plan_is_raised() -> None:
    both = threading.Barrier(2)

    def on(op: Op) -> None:
        if op.kind is OpKind.FETCH and op.subgroup < 2:
            both.wait(LONG)
            raise ValueError(short(op))

    with running(Runner(on), plan_of(4)) as executor:
        executor.step()
        with pytest.raises(ValueError, match="fetch 0"):
            executor.finish()


def test_cancel_waits_for_all_that_has_begun() -> None:
    second, release = threading.Event(), threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 1":
            second.set()
        if op.kind is OpKind.FETCH:
            assert release.wait(LONG)

    runner = Runner(on)
    with running(runner, plan_of(6)) as executor:
        assert second.wait(LONG)
        threading.Timer(0.05, release.set).start()
        spans = executor.cancel()
        assert runner.at_once[READ] == 0
        assert {span.subgroup for span in of_lane(spans, READ)} >= {0, 1}
        assert not executor.busy


def test_the_watchdog_names_the_op_that_holds_up_the_others() -> None:
    release = threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 2":
            release.wait(LONG)

    with running(Runner(on), plan_of(6), watchdog_seconds=0.3) as executor:
        executor.step()
        with pytest.raises(LaneStuckError, match="Lane nvme:read is stuck: fetch 2 nvme"):
            executor.finish()
        assert executor.stuck
        release.set()


@dataclass
class SetClock(MonotonicClock):
    """A clock that says the time that a test has set, and in `looked` when somebody waited in vain until then."""

    time: float = 0.0
    looked: queue.SimpleQueue[float] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        super().__init__()

    def now(self) -> float:
        return self.time

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        came = super().wait_for(predicate, None if timeout is None else 0.01)
        if not came:
            self.looked.put(self.time)
        return came


def test_the_watchdog_does_not_count_the_time_that_an_op_spent_behind_another_one() -> None:
    """Both fetches begin at once, and each takes 8 of the 10 seconds once it is the first of its lane."""
    clock, plan = SetClock(), plan_of(2)
    first, second, both = threading.Event(), threading.Event(), threading.Event()

    def on(op: Op) -> None:
        if short(op) == "fetch 1":
            both.set()
        if op.kind is OpKind.FETCH:
            assert (first if op.subgroup == 0 else second).wait(LONG)

    executor = Executor(Runner(on), clock, lanes=plan.lane_names, ahead=(READ, WRITE), watchdog_seconds=10.0)
    fetched = [op.id for op in plan.lanes[READ]]

    def pass_time() -> None:
        assert both.wait(LONG)
        clock.time = 8.0
        first.set()
        executor.wait_until_issued(fetched[:1])
        clock.time = 16.0
        for _ in range(3):
            while clock.looked.get(timeout=LONG) < 16.0:
                pass
        second.set()

    executor.start(plan)
    executor.step()
    passing = threading.Thread(target=pass_time)
    passing.start()
    try:
        executor.finish()
    finally:
        first.set()
        second.set()
        passing.join(LONG)
        executor.close()
    assert clock.time == 16.0
