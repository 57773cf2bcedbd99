"""The dispatcher in virtual time gives the simulator's timeline, span by span; and what happens when a lane fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.services import ROOT, until
from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.executor import Executor, StepSkipped
from tidegate.agent.engine.interpreter_exit import stop_all
from tidegate.agent.engine.plan_execution import IssuedOp, program_of
from tidegate.errors import EngineError, LaneStuckError
from tidegate.kernels.dispatch import Dispatcher, Outcome
from tidegate.plan import Placement, Plan, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.plan.ops import LANES, Op, OpKind
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard

RATES = RateCard(
    h2d_bytes_per_second=3e3, d2h_bytes_per_second=2e3, cpu_params_per_second=500.0,
    device_params_per_second=2500.0, norm_params_per_second=9000.0, overhead_seconds=0.001,
)  # fmt: skip


def subgroups(sizes: list[int]) -> tuple[Subgroup, ...]:
    return tuple(Subgroup(i, n, 2, 2, 10) for i, n in enumerate(sizes))


def run_in_virtual_time(plan: Plan, step_at: float, ready_at: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Drives the dispatcher through a plan in virtual time, with ops that take their rate card's time. Returns start
    and end of each op by its id."""
    dispatcher = Dispatcher(program_of(plan, LANES), [False] * len(LANES))
    spans: dict[int, tuple[float, float]] = {}
    events: list[tuple[float, int, str, int]] = [(step_at, 0, "step", 0)]
    events += [(at, 0, "gradient", subgroup) for subgroup, at in ready_at.items()]
    now = 0.0
    while True:
        for lane in range(len(LANES)):
            begun = dispatcher.begin(lane, now)
            if begun is not None:
                op = plan.ops[begun[0]]
                spans[op.id] = (now, now + RATES.seconds(op))
                events.append((spans[op.id][1], 1, "end", begun[1]))
        if not events:
            assert dispatcher.is_done
            return spans
        event = min(events)
        events.remove(event)
        now, _, what, number = event
        if what == "step":
            dispatcher.step([])
        elif what == "gradient":
            dispatcher.open_gradients([number])
        else:
            dispatcher.ended(number, Outcome.ISSUED, now)


@settings(max_examples=examples(25))
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=14),
    stride=st.sampled_from(["off", 1.0, 1.7, 2.0, 3.0]),
    ratio=st.sampled_from([0.0, 0.25, 1.0]),
    slots=st.integers(1, 3),
    policy=st.sampled_from(["interleaved", "sequential"]),
    step_at=st.sampled_from([0.5, 3.0]),
)
def test_dispatcher_and_simulator_give_the_same_timeline(
    sizes: list[int], stride: float | str, ratio: float, slots: int, policy: str, step_at: float
) -> None:
    groups = subgroups(sizes)
    plan = make_plan(
        groups,
        steady_placements(place_subgroups(len(groups), stride=stride, static_ratio=ratio)),
        num_slots=slots,
        policy=policy,
    )  # type: ignore[arg-type]
    on_cpu = [i for i, p in enumerate(plan.placements) if p.processor == "cpu"]
    ready_at = {s: 0.4 * (i + 1) / len(on_cpu) for i, s in enumerate(reversed(on_cpu))}
    executed = run_in_virtual_time(plan, step_at, ready_at)
    simulated = simulate(plan, RATES, step_at=step_at, gradient_ready=ready_at)
    assert len(executed) == len(simulated.spans) == len(plan.ops)
    for expected in simulated.spans:
        assert executed[expected.op] == pytest.approx((expected.start, expected.end), abs=1e-9)


# ---- what can go wrong


@dataclass
class ScriptedRunner:
    """Runs ops at once, but for what `on` says."""

    on: Callable[[Op], None]

    def wait(self, lane: str, event: Event) -> None:
        event.wait()

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        self.on(op)
        return IssuedOp(DoneEvent(0.0, 0.0), op.nbytes, op.numel)


def small_plan() -> Plan:
    placements = [Placement("cpu", "host", "host", True), Placement("device", "host", "host", False)] * 3
    return make_plan(subgroups([5] * 6), placements, num_slots=2)


def scripted(on: Callable[[Op], None], watchdog_seconds: float = 30.0) -> Executor:
    return Executor(ScriptedRunner(on), watchdog_seconds=watchdog_seconds)


def test_an_error_in_a_lane_is_raised_by_finish_and_the_rest_does_not_run() -> None:
    ran: list[OpKind] = []

    def on(op: Op) -> None:
        if op.kind is OpKind.NORM:
            raise ValueError("broken kernel")
        ran.append(op.kind)

    executor = scripted(on)
    executor.start(small_plan())
    executor.step()
    with pytest.raises(ValueError, match="broken kernel"):
        executor.finish()
    assert OpKind.CPU_UPDATE not in ran
    assert not executor.busy
    executor.close()


def test_a_skipped_step_drops_every_update() -> None:
    ran: list[OpKind] = []

    def on(op: Op) -> None:
        if op.kind is OpKind.NORM:
            raise StepSkipped
        ran.append(op.kind)

    executor = scripted(on)
    executor.start(small_plan())
    executor.step()
    _, skipped = executor.finish()
    assert skipped
    assert not {OpKind.CPU_UPDATE, OpKind.DEVICE_UPDATE, OpKind.WEIGHT_H2D} & set(ran)
    executor.close()


def test_the_watchdog_names_lane_and_op() -> None:
    release = threading.Event()

    def on(op: Op) -> None:
        if op.kind is OpKind.CPU_UPDATE:
            release.wait(30)

    executor = scripted(on, watchdog_seconds=0.2)
    executor.start(small_plan())
    executor.step()
    with pytest.raises(LaneStuckError, match="Lane cpu is stuck: cpu_update 0"):
        executor.finish()
    release.set()
    executor.close()


def test_only_copies_run_before_step_and_a_cancelled_plan_leaves_none() -> None:
    ran: list[OpKind] = []
    executor = scripted(lambda op: ran.append(op.kind))
    plan = small_plan()
    executor.start(plan)
    executor.gradient_ready([0, 2, 4])
    executor.cancel()
    assert set(ran) <= {OpKind.GRAD_D2H, OpKind.STATE_H2D}
    assert not executor.busy
    executor.start(plan)
    executor.step()
    spans, _ = executor.finish()
    assert sorted(span.op for span in spans) == [op.id for op in plan.ops]
    executor.close()


def test_a_gradient_that_changed_is_copied_again_before_its_update() -> None:
    order: list[str] = []
    copied = threading.Event()

    def on(op: Op) -> None:
        order.append(op.name)
        if op.name == "grad_d2h 4":
            copied.set()

    executor = scripted(on)
    executor.start(small_plan())
    executor.gradient_ready([4])
    assert copied.wait(10)
    early = executor.done_early()
    assert [op.name for op in early] == ["grad_d2h 4"]
    executor.step(repeat=[op.id for op in early])
    executor.finish()
    assert order.count("grad_d2h 4") == 2
    second = len(order) - 1 - order[::-1].index("grad_d2h 4")
    assert second < order.index("cpu_update 4")
    executor.close()


def test_an_update_waits_for_the_repeated_copy_of_its_gradient_alone() -> None:
    """Copies of other gradients are done: the order of the lane does not hold the update back."""
    copies: list[str] = []
    all_copied, others_updated, updated = threading.Event(), threading.Event(), threading.Event()
    updated_meanwhile: list[bool] = []

    def on(op: Op) -> None:
        if op.kind is OpKind.GRAD_D2H:
            copies.append(op.name)
            if copies.count("grad_d2h 4") == 2:
                assert others_updated.wait(10)
                updated_meanwhile.append(updated.wait(0.2))
            elif len(copies) == 3:
                all_copied.set()
        elif op.name in ("cpu_update 2", "cpu_update 4"):
            (others_updated if op.name == "cpu_update 2" else updated).set()

    executor = scripted(on)
    executor.start(small_plan())
    executor.gradient_ready([0, 2, 4])
    assert all_copied.wait(10)
    executor.step(repeat=[op.id for op in executor.done_early() if op.subgroup == 4])
    executor.finish()
    assert updated_meanwhile == [False]
    assert updated.is_set()
    executor.close()


def test_a_closed_executor_says_so() -> None:
    executor = scripted(lambda op: None)
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.start(small_plan())


@pytest.mark.parametrize("seconds", ["0", pytest.param("0.01", marks=pytest.mark.slow)])
def test_the_process_ends_well_while_a_lane_frees_the_last_tensors(seconds: str) -> None:
    """Which torch answers with SIGABRT, wherever the interpreter begins to end meanwhile."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.engine.freed_by_a_lane", seconds],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "begun",
    ["backward", "update", *[pytest.param("update", id=f"again-{n}", marks=pytest.mark.slow) for n in range(3)]],
)
def test_the_process_ends_well_while_lanes_are_in_torch_and_in_kernels(begun: str) -> None:
    """Which unwinds their threads through C++ otherwise. An update that has begun is finished."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.engine.ends_while_lanes_run", begun],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    ops, *ended = done.stdout.splitlines()
    assert (len(ended) == int(ops)) == (begun == "update"), ended


def test_what_an_ending_process_does_not_finish_is_said_to_whoever_asks() -> None:
    """Another exit hook, which runs later."""
    began = threading.Event()

    def on(op: Op) -> None:
        began.set()
        until(lambda: executor.closed, "the end")

    executor = scripted(on)
    executor.start(small_plan())
    executor.step()
    assert began.wait(10)
    executor.stop_before_exit(time.monotonic())
    assert not any(thread.is_alive() for thread in executor._threads)
    with pytest.raises(EngineError, match="process ends"):
        executor.finish()
    executor.close()


@pytest.mark.parametrize("cut_short", ["the wait for ops", "the end of the lanes", "the wait for a thread"])
def test_whatever_cuts_a_close_short_an_op_that_runs_makes_it_stuck(
    cut_short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody frees the memory that the op uses."""
    began, release = threading.Event(), threading.Event()

    def on(op: Op) -> None:
        began.set()
        assert release.wait(60)

    def interrupted(*_: object) -> None:
        raise TimeoutError("a handler of the user's")

    executor = scripted(on)
    executor.start(small_plan())
    executor.step()
    assert began.wait(10)
    monkeypatch.setattr(executor, "_wait", interrupted)
    for thread in executor._threads:
        monkeypatch.setattr(thread, "join", interrupted if cut_short == "the wait for a thread" else lambda _: None)
    if cut_short == "the end of the lanes":
        monkeypatch.setattr(executor, "_lanes", Mock(executor._lanes, close=interrupted, drop=executor._lanes.drop))
    with pytest.raises(TimeoutError):
        executor.close()
    assert executor.stuck
    release.set()


def test_an_op_that_outlives_the_end_of_the_process_makes_it_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit hooks that run later may close the optimizer."""
    monkeypatch.setattr("tidegate.agent.engine.executor.LONGEST_WAIT_SECONDS", 0.1)
    began, release = threading.Event(), threading.Event()

    def on(op: Op) -> None:
        began.set()
        assert release.wait(60)

    executor = scripted(on)
    executor.start(small_plan())
    executor.step()
    assert began.wait(10)
    executor.stop_before_exit(time.monotonic())
    assert executor.stuck
    assert executor.closed
    release.set()


def test_a_forked_process_does_not_wait_for_lanes_that_it_has_not() -> None:
    executor = scripted(lambda op: None)
    executor.start(small_plan())
    child = os.fork()
    if child == 0:
        stop_all()
        os._exit(0 if not executor.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    executor.close()
