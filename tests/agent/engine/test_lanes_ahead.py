"""Lanes that begin an op before the last one has ended: in which order, what they show, and what may go wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.agent.engine.test_executor import subgroups
from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_execution import IssuedOp, program_of
from tidegate.errors import LaneStuckError
from tidegate.kernels.dispatch import Dispatcher, Outcome
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
    executor = Executor(runner, lanes=plan.lane_names, ahead=(READ, WRITE), watchdog_seconds=watchdog_seconds)
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


def test_the_watchdog_does_not_count_the_time_that_an_op_spent_behind_another_one() -> None:
    """Both fetches begin at once, and the second counts from the end of the first."""
    plan = plan_of(2)
    lanes = plan.lane_names
    dispatcher = Dispatcher(program_of(plan, lanes), [lane in (READ, WRITE) for lane in lanes])
    dispatcher.step([])
    fetches = []
    for at in (1.0, 2.0):
        begun = dispatcher.begin(lanes.index(READ), at)
        assert begun is not None
        fetches.append(begun)
        dispatcher.queued(begun[1])
    assert dispatcher.oldest() == (fetches[0][0], 1.0)
    dispatcher.ended(fetches[0][1], Outcome.ISSUED, 8.0)
    assert dispatcher.oldest() == (fetches[1][0], 8.0)
