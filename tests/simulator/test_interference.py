"""Lanes that slow each other down, by hand; and without contention, the same times as the plain simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import ConfigError, PlanError
from tidegate.plan import Op, OpKind, Plan, Subgroup, make_plan
from tidegate.plan.interference import (
    DUPLEX,
    HALF_DUPLEX,
    InterferenceFactors,
    both_seconds,
    lane_speeds,
    relative_speed,
)
from tidegate.plan.plan import Placement
from tidegate.simulator.event_loop import Times, times_together
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import Rates

CARD = RateCard(
    h2d_bytes_per_second=100.0, d2h_bytes_per_second=50.0, cpu_params_per_second=10.0,
    device_params_per_second=200.0, norm_params_per_second=400.0,
)  # fmt: skip
FETCH, FLUSH = Op(0, OpKind.FETCH, 0, 0, 0, path="disk"), Op(1, OpKind.FLUSH, 1, 0, 0, path="disk")
TWO = Plan("interleaved", (), (), 0, (FETCH, FLUSH), paths=("disk",))


def contended_times(
    seconds: dict[int, float], keeps: InterferenceFactors, gates: dict[int, float], plan: Plan = TWO
) -> tuple[Times, Times]:
    [times] = times_together([plan], lambda op: seconds[op.id], lambda op: gates.get(op.id, 0.0), keeps)
    return times


def test_a_shared_disk_gives_each_half_until_one_is_done() -> None:
    """4 s and 10 s of work alone: both at half speed until 8, then the flush has the disk: 6 s are left of it."""
    keeps = {"disk:read": {"disk:write": 0.5}, "disk:write": {"disk:read": 0.5}}
    assert contended_times({0: 4.0, 1: 10.0}, keeps, {}) == ({0: 0.0, 1: 0.0}, {0: 8.0, 1: 14.0})


def test_one_may_suffer_more_than_the_other_and_a_gate_opens_in_between() -> None:
    """The flush runs alone until the fetch may start at 2, then at a quarter of its speed."""
    keeps = {"disk:write": {"disk:read": 0.25}}
    starts, ends = contended_times({0: 4.0, 1: 10.0}, keeps, {0: 2.0})
    assert (starts, ends) == ({0: 2.0, 1: 0.0}, {0: 6.0, 1: 13.0})


def test_what_others_take_adds_up() -> None:
    keeps = {"cpu": {"h2d": 0.5, "d2h": 0.8, "device": 0.1}}
    assert relative_speed("cpu", {"h2d": 1, "cpu": 1}, keeps) == pytest.approx(0.5)
    assert relative_speed("cpu", {"h2d": 1, "d2h": 1, "cpu": 1}, keeps) == pytest.approx(1 / (1 + 1 + 0.25))


def test_lanes_that_take_turns_on_one_disk_get_equal_parts() -> None:
    lanes = ["a:read", "a:write", "b:read", "b:write"]
    keeps = {lane: {other: 0.5 for other in lanes if other != lane} for lane in lanes}
    assert [relative_speed(lane, dict.fromkeys(lanes), keeps) for lane in lanes] == pytest.approx([1 / 4] * 4)
    assert relative_speed("h2d", {"cpu": 1}, keeps) == 1.0


@pytest.mark.parametrize(
    ("one", "other", "shares", "seconds"),
    [
        (4.0, 10.0, (0.5, 0.5), 14.0),
        (4.0, 10.0, (0.2, 0.5), 14.0),  # in turns is better than at once
        (4.0, 10.0, (1.0, 1.0), 10.0),
        (4.0, 10.0, (0.8, 0.8), 5.0 + 6.0),
        (10.0, 4.0, (0.8, 0.8), 5.0 + 6.0),
        (0.0, 3.0, (0.5, 0.5), 3.0),
    ],
)
def test_the_least_time_for_two_lanes(one: float, other: float, shares: tuple[float, float], seconds: float) -> None:
    assert both_seconds(one, other, shares) == pytest.approx(seconds)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.05, 1), st.floats(0.05, 1))
def test_the_least_time_is_that_of_the_simulation_or_of_turns(one: float, other: float, f: float, g: float) -> None:
    _, ends = contended_times({0: one, 1: other}, {"disk:read": {"disk:write": f}, "disk:write": {"disk:read": g}}, {})
    expected = min(max(ends.values()), one + other)
    assert both_seconds(one, other, (f, g)) == pytest.approx(expected)
    assert both_seconds(one, other, HALF_DUPLEX) == one + other
    assert both_seconds(one, other, DUPLEX) == max(one, other)


def test_lanes_of_a_card_get_fair_shares_of_what_their_factors_leave_them() -> None:
    """Both halve each other, so both at half speed ask for 0.75 of the memory each, where 0.5 is there."""
    keeps = {"disk:read": {"disk:write": 0.5}, "disk:write": {"disk:read": 0.5}}
    at_work = {(0, "disk:read"): FETCH, (0, "disk:write"): FLUSH}
    assert lane_speeds(at_work, keeps) == dict.fromkeys(at_work, 0.5)
    assert lane_speeds(at_work, keeps, lambda _: {"memory": 0.9}) == pytest.approx(dict.fromkeys(at_work, 0.5))
    assert lane_speeds(at_work, keeps, lambda _: {"memory": 1.5}) == pytest.approx(dict.fromkeys(at_work, 1 / 3))


def tiered_plan(count: int, slots: int) -> Plan:
    subgroups = [Subgroup(i, 10 + i, 2, 2, 10) for i in range(count)]
    placements = [
        Placement("device" if i % 3 else "cpu", path, path, False, grad_in_slot=not i % 3)
        for i, path in zip(range(count), ("nvme", "pfs") * count, strict=False)
    ]
    return make_plan(subgroups, placements, num_slots=2, host_slots={"nvme": slots, "pfs": slots})


@settings(max_examples=examples(60))
@given(
    count=st.integers(1, 9),
    slots=st.integers(1, 3),
    seconds=st.lists(st.floats(0, 10), min_size=7, max_size=7),
    step_at=st.floats(0, 50),
    share=st.floats(0.1, 1.0),
)
def test_contention_changes_times_and_nothing_else(
    count: int, slots: int, seconds: list[float], step_at: float, share: float
) -> None:
    plan = tiered_plan(count, slots)
    args = {"step_at": step_at, "durations": lambda op: seconds[op.id % len(seconds)]}
    lanes = list(plan.lanes)
    none = replace(CARD, keeps={lane: {other: 1.0 for other in lanes if other != lane} for lane in lanes})
    alone, same = simulate(plan, CARD, **args), simulate(plan, none, **args)  # type: ignore[arg-type]
    by_op = {span.op: span for span in same.spans}
    for span in alone.spans:
        assert (by_op[span.op].start, by_op[span.op].end) == pytest.approx((span.start, span.end), abs=1e-6)
    slow = replace(CARD, keeps={lane: {other: share for other in lanes if other != lane} for lane in lanes})
    found = simulate(plan, slow, **args)  # type: ignore[arg-type]
    ends = {span.op: span.end for span in found.spans}
    lane_end: dict[str, float] = {}
    for op in plan.ops:
        span = next(span for span in found.spans if span.op == op.id)
        assert span.start >= max([lane_end.get(op.lane, 0.0), *(ends[dep] for dep in op.deps)]) - 1e-9
        assert span.end - span.start >= args["durations"](op) - 1e-6  # type: ignore[operator]
        lane_end[op.lane] = span.end


def test_a_deadlock_is_told() -> None:
    circle = replace(TWO, ops=(replace(FETCH, deps=(1,)), replace(FLUSH, deps=(0,))))
    with pytest.raises(PlanError, match="still waits"):
        contended_times({0: 1.0, 1: 1.0}, {"disk:read": {"disk:write": 0.5}}, {}, circle)


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_what_cannot_be_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match=r"keeps\['cpu'\]\['h2d'\]"):
        replace(CARD, keeps={"cpu": {"h2d": share}})


def test_contention_travels() -> None:
    card = replace(CARD, keeps={"cpu": {"h2d": 0.5}})
    assert RateCard.from_dict(Rates(**card.to_dict()).model_dump()) == card
