"""What a step shows of the speeds of paths: the second half of what moved, each way, whatever the other way did."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidegate
from tests.agent.engine.test_exactness import FAST
from tests.agent.optimizer.test_optimizer import params_of, run_steps
from tidegate.agent.engine.residency import traffic
from tidegate.plan.interference import DUPLEX
from tidegate.plan.ops import OpKind
from tidegate.plan.tier_split import PathSpeeds
from tidegate.speeds.path_speed_estimator import PathSpeedEstimator, PathStepTotals
from tidegate.timeline.step_result import StepResult
from tidegate.timeline.timeline import Span


def spans(kind: OpKind, *times: tuple[float, float], first: int = 0) -> list[Span]:
    lane = f"a:{'read' if kind is OpKind.FETCH else 'write'}"
    return [Span(i, kind, lane, i, start, end, 100, 0, "state", None) for i, (start, end) in enumerate(times, first)]


def test_what_is_served_at_once_after_a_rest_does_not_count() -> None:
    seen = traffic(spans(OpKind.FETCH, (0.0, 0.01), (0.01, 0.02), (0.02, 1.02), (1.02, 2.02)))["a"]
    assert (seen.read_bytes, seen.read_seconds) == (200, pytest.approx(2.0))
    assert (seen.write_bytes, seen.write_seconds) == (0, 0.0)


def test_one_op_counts_as_it_is_and_order_does_not_matter() -> None:
    assert traffic(spans(OpKind.FLUSH, (1.0, 3.0)))["a"].write_seconds == pytest.approx(2.0)
    late = traffic(spans(OpKind.FLUSH, (5.0, 9.0), (0.0, 1.0)))["a"]
    assert (late.write_bytes, late.write_seconds) == (100, pytest.approx(4.0))


def test_deferred_flushes_show_how_fast_a_path_writes_and_do_not_count_for_the_update() -> None:
    reads = spans(OpKind.FETCH, (0.0, 1.0), (1.0, 2.0))
    writes = spans(OpKind.FLUSH, (1.0, 2.0), (2.0, 3.0), (9.0, 9.5), (9.5, 10.0), first=10)
    seen = traffic([*reads, *writes], deferred={12, 13})["a"]
    assert (seen.write_bytes, seen.write_seconds) == (200, pytest.approx(1.0))
    assert seen.whole == PathStepTotals(read_bytes=200, write_bytes=200, busy_seconds=3.0, step_seconds=3.0)


def test_time_is_shared_with_all_that_goes_the_other_way() -> None:
    """The late read meets an early write: half of that time was not its own."""
    reads, writes = spans(OpKind.FETCH, (0.0, 1.0), (1.0, 3.0)), spans(OpKind.FLUSH, (1.0, 2.0), (2.0, 4.0))
    seen = traffic([*reads, *writes])["a"]
    assert (seen.read_seconds, seen.shared_read_seconds) == (pytest.approx(2.0), pytest.approx(2.0))
    assert (seen.write_seconds, seen.shared_write_seconds) == (pytest.approx(2.0), pytest.approx(1.0))


def test_what_needed_no_moving_shows_nothing() -> None:
    fetched = Span(0, OpKind.FETCH, "a:read", 0, 0.0, 1.0, 0, 0, "state", None)
    assert traffic([fetched]) == {}


def test_the_whole_step_counts_all_ops_and_the_time_of_all_paths() -> None:
    reads, writes = spans(OpKind.FETCH, (0.0, 1.0), (1.0, 3.0)), spans(OpKind.FLUSH, (2.0, 4.0), (5.0, 6.0))
    other = Span(9, OpKind.FETCH, "b:read", 9, -2.0, 8.0, 50, 0, "state", None)
    whole = traffic([*reads, *writes, other])["a"].whole
    assert whole is not None
    assert (whole.read_bytes, whole.write_bytes) == (200, 200)
    assert (whole.busy_seconds, whole.step_seconds) == (pytest.approx(5.0), pytest.approx(10.0))
    assert not whole.saturated
    assert whole.seconds_per_byte(DUPLEX) == pytest.approx(5.0 / 200)


def test_plans_go_by_the_speeds_of_now_not_by_those_of_the_first_step(tmp_path: Path) -> None:
    """What was fetched is updated before what needs no path, if it can be there by then."""
    offload = tidegate.Offload(
        stride="off", static_ratio=0.0, subgroup_numel=1000, emulated=FAST, paths={"disk": tmp_path}, host_cache=40_000,
        order="pinned",
    )  # fmt: skip
    with tidegate.AdamW(params := params_of((8000,)), offload=offload) as optimizer:
        results: list[StepResult] = []
        optimizer.observers.append(lambda result, _: results.append(result))
        engine = optimizer.engine

        def first_from_disk(bytes_per_second: float) -> bool:
            speeds = PathSpeeds(read_bytes_per_second=bytes_per_second, write_bytes_per_second=bytes_per_second)
            engine.residences._estimator = PathSpeedEstimator({"disk": speeds})
            run_steps(optimizer, params, 0, 2)
            plan = results[-1].plan
            updated = next(op for op in plan.ops if op.kind is OpKind.CPU_UPDATE)
            return plan.placements[updated.subgroup].before == "disk"

        assert [first_from_disk(speed) for speed in (1e15, 1e3, 1e15)] == [True, False, True]
