"""Virtual time: hand-made schedules, and what always holds."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import PlanError
from tidegate.plan import OpKind, Plan, Policy, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.timeline import PhaseSpan

H100 = RateCard(
    h2d_bytes_per_second=52e9,
    d2h_bytes_per_second=52e9,
    cpu_params_per_second=2e9,
    device_params_per_second=25e9,
    norm_params_per_second=500e9,
)
"""One GPU of the paper's H100 node (DOS section 5.1 and Table 1)."""


def subgroups(count: int, numel: int = 100_000_000) -> list[Subgroup]:
    return [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


def plan_of(count: int, stride: float, static_ratio: float, num_slots: int = 2, policy: Policy = "interleaved") -> Plan:
    placements = steady_placements(place_subgroups(count, stride=stride, static_ratio=static_ratio))
    return make_plan(subgroups(count), placements, num_slots=num_slots, policy=policy, rates=H100)


def test_a_schedule_worked_out_by_hand() -> None:
    """c d: gradient at 4, step at 5; every op takes one second."""
    plan = plan_of(2, 2, 0.0, num_slots=1)
    timeline = simulate(plan, H100, step_at=5.0, gradient_ready={0: 4.0}, step=7, durations=lambda op: 1.0)
    assert [(span.kind.value, span.start, span.end) for span in timeline.spans] == [
        ("state_h2d", 0.0, 1.0),
        ("grad_d2h", 4.0, 5.0),
        ("norm", 5.0, 6.0),
        *sorted([("cpu_update", 6.0, 7.0), ("device_update", 6.0, 7.0)], key=lambda row: order(plan, row[0])),
        *sorted([("weight_h2d", 7.0, 8.0), ("state_d2h", 7.0, 8.0)], key=lambda row: order(plan, row[0])),
    ]
    assert (timeline.step, timeline.source) == (7, "simulated")
    assert timeline.phases == (PhaseSpan("backward", 0.0, 5.0), PhaseSpan("update", 5.0, 8.0))
    assert timeline.deps == {op.id: op.deps for op in plan.ops}


def order(plan: Plan, kind: str) -> int:
    return next(op.id for op in plan.ops if op.kind == kind)


plans = st.builds(
    plan_of,
    st.integers(1, 12),
    st.floats(1, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 3),
    st.sampled_from(["interleaved", "sequential"]),
)


@settings(max_examples=examples(100))
@given(plan=plans, seconds=st.lists(st.floats(0, 10), min_size=7, max_size=7), step_at=st.floats(0, 50))
def test_what_holds_in_every_simulation(plan: Plan, seconds: list[float], step_at: float) -> None:
    ready = {i: i / 3 for i in range(len(plan.subgroups))}
    args = {"step_at": step_at, "gradient_ready": ready, "durations": lambda op: seconds[op.id % len(seconds)]}
    timeline = simulate(plan, H100, **args)
    assert simulate(plan, H100, **args) == timeline
    spans = {span.op: span for span in timeline.spans}
    assert sorted(spans) == [op.id for op in plan.ops]
    lane_end: dict[str, float] = {}
    for op in plan.ops:
        gate = {"none": 0.0, "step": step_at, "gradient": ready.get(op.subgroup, 0.0)}[op.gate]
        earliest = max([lane_end.get(op.lane, 0.0), gate, *(spans[dep].end for dep in op.deps)])
        assert spans[op.id].start == earliest
        lane_end[op.lane] = spans[op.id].end
    assert timeline.phases[-1].end == max(step_at, *(span.end for span in timeline.spans))
    if plan.policy == "sequential":
        ordered = sorted(timeline.spans, key=lambda span: span.op)
        assert all(a.end <= b.start for a, b in itertools.pairwise(ordered))


def test_a_deadlock_is_told() -> None:
    plan = plan_of(2, 2, 0.0)
    norm = next(plan.of_kind(OpKind.NORM))
    circle = replace(norm, deps=(next(plan.of_kind(OpKind.CPU_UPDATE)).id,))
    broken = replace(plan, ops=tuple(circle if op is norm else op for op in plan.ops))
    with pytest.raises(PlanError, match="still waits"):
        simulate(broken, H100, step_at=0.0)


def test_the_order_in_which_ops_are_listed_changes_nothing() -> None:
    plan = plan_of(9, 2, 0.3)
    reordered = replace(plan, ops=tuple(op for lane in reversed(plan.lanes.values()) for op in lane))
    assert reordered.ops != plan.ops
    found, expected = simulate(reordered, H100, step_at=0.1), simulate(plan, H100, step_at=0.1)
    assert found.spans == expected.spans
    assert found.phases == expected.phases
