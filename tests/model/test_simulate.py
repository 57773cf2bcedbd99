"""Virtual time: hand-made schedules, bounds that always hold, and what the model advises."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import ConfigError, PlanError
from tidegate.knobs import device_share
from tidegate.model import Prediction, RateCard, best_stride, simulate, what_if
from tidegate.model.simulate import CANDIDATE_STRIDES, _equation_stride, _floor_seconds, better_stride
from tidegate.plan import OpKind, Plan, Policy, Subgroup, make_plan, place, steady
from tidegate.timeline import PhaseSpan

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
    placements = steady(place(count, stride=stride, static_ratio=static_ratio))
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


@settings(max_examples=100, deadline=None)
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


def predict(count: int, stride: float | str, static_ratio: float = 0.0, rates: RateCard = H100) -> Prediction:
    knobs = {"stride": stride, "static_ratio": static_ratio, "num_slots": 2}
    return what_if(subgroups(count), rates=rates, **knobs)  # type: ignore[arg-type]


def test_all_on_the_cpu_takes_what_the_cpu_takes() -> None:
    found = predict(10, "off")
    norm, cpu, last_weight = 1e9 / 500e9, 1e9 / 2e9, 2e8 / 52e9
    assert found.update_seconds == pytest.approx(norm + cpu + last_weight)
    assert found.stalls == pytest.approx({"h2d": last_weight})
    assert found.link_bytes == {"h2d": 2_000_000_000, "d2h": 2_000_000_000}
    assert found.updated_params == {"cpu": 1_000_000_000, "device": 0}
    assert found.device_bytes == 0


def test_all_resident_takes_what_the_device_takes() -> None:
    found = predict(10, "off", static_ratio=1.0)
    assert found.update_seconds == pytest.approx(1e9 / 500e9 + 1e9 / 25e9)
    assert found.device_bytes == 10_000_000_000
    assert found.link_bytes == {"h2d": 0, "d2h": 0}


@pytest.mark.parametrize(("stride", "ratio"), [("off", 0.0), (1, 0.0), (2, 0.0), (2.5, 0.3), (1.25, 0.1)])
def test_figures_without_a_simulation_are_those_of_the_plan(stride: float, ratio: float) -> None:
    plan = plan_of(12, stride, ratio)
    found = predict(12, stride, ratio)
    assert found.link_bytes == {lane: plan.link_bytes(lane) for lane in ("h2d", "d2h")}
    assert found.updated_params == {"cpu": plan.updated_params("cpu"), "device": plan.updated_params("device")}
    residents = sum(p.after == "device" for p in plan.placements)
    slots = 2 if any(op.slot is not None for op in plan.ops) else 0
    assert found.device_bytes == (residents + slots) * 1_000_000_000


def test_interleaving_beats_the_cpu_alone_as_in_the_paper() -> None:
    """DOS Fig. 10: the update at least 1.7 times as fast as TwinFlow's, which at ratio 0 has it all on the CPU.

    The reverse is not claimed: the rate card knows of no contention for host memory, so it promises more than they saw.
    """
    assert predict(50, "off").update_seconds / predict(50, 2).update_seconds > 1.7


def test_many_subgroups_are_scaled() -> None:
    few, many = predict(400, 2), predict(1200, 2)
    assert many.update_seconds == pytest.approx(3 * few.update_seconds)
    assert many.link_bytes["h2d"] == 3 * few.link_bytes["h2d"]


@pytest.mark.parametrize(
    ("rates", "ratio", "num_slots", "low", "high"),
    [
        (H100, 0.0, 2, 1.0, 2.0),
        (replace(H100, h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9), 0.0, 2, 6.0, float("inf")),
        (H100, 1.0, 2, float("inf"), float("inf")),  # nothing left to stage: ask nothing of the device
        (H100, 0.0, 0, float("inf"), float("inf")),  # no slot
    ],
)
def test_best_stride(rates: RateCard, ratio: float, num_slots: int, low: float, high: float) -> None:
    stride = best_stride(subgroups(40), ratio, num_slots, rates)
    assert low <= (float("inf") if stride == "off" else stride) <= high


def test_best_stride_is_the_best_candidate() -> None:
    best = predict(40, best_stride(subgroups(40), 0.1, 2, H100), 0.1).update_seconds
    assert all(best <= predict(40, stride, 0.1).update_seconds * (1 + 1e-9) for stride in ["off", *CANDIDATE_STRIDES])


speeds = st.floats(7, 11).map(lambda exponent: 10.0**exponent)
cards = st.builds(
    RateCard,
    h2d_bytes_per_second=speeds,
    d2h_bytes_per_second=speeds,
    cpu_params_per_second=speeds,
    device_params_per_second=speeds,
    norm_params_per_second=speeds,
    overhead_seconds=st.sampled_from([None, 0.0, 1e-4]),
)


@settings(max_examples=60, deadline=None)
@given(
    rates=cards,
    sizes=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=24),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    num_slots=st.integers(1, 4),
    stride=st.sampled_from(["off", *CANDIDATE_STRIDES]),
)
def test_what_is_not_simulated_could_not_have_been_better(
    rates: RateCard, sizes: list[int], ratio: float, num_slots: int, stride: float
) -> None:
    """The choice is that of simulating every candidate, and a floor is one."""
    groups = [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i, numel in enumerate(sizes)]
    at = {"static_ratio": ratio, "num_slots": num_slots, "rates": rates}
    candidates = ["off", *CANDIDATE_STRIDES, *_equation_stride(groups, rates)]
    seconds = {one: what_if(groups, stride=one, **at).update_seconds for one in candidates}  # type: ignore[arg-type]
    for one, found in seconds.items():
        assert _floor_seconds(groups, one, ratio, num_slots, rates) <= found * (1 + 1e-9)  # type: ignore[arg-type]
    best = min(candidates, key=lambda one: (float(f"{seconds[one]:.9g}"), device_share(one)))  # type: ignore[arg-type]
    assert best_stride(groups, ratio, num_slots, rates) == best
    better = better_stride(stride, groups, ratio, num_slots, rates, minimum_gain=0.05)
    assert better == (best if seconds[best] < 0.95 * seconds[stride] else None)


def test_the_order_in_which_ops_are_listed_changes_nothing() -> None:
    plan = plan_of(9, 2, 0.3)
    reordered = replace(plan, ops=tuple(op for lane in reversed(plan.lanes.values()) for op in lane))
    assert reordered.ops != plan.ops
    found, expected = simulate(reordered, H100, step_at=0.1), simulate(plan, H100, step_at=0.1)
    assert found.spans == expected.spans
    assert found.phases == expected.phases


def test_best_stride_for_3000_subgroups_takes_seconds_at_most() -> None:
    start = time.process_time()
    best_stride(subgroups(3000), 0.0, 2, H100)
    assert time.process_time() - start < 5.0


def test_nothing_to_predict() -> None:
    with pytest.raises(ConfigError):
        predict(0, 2)
    with pytest.raises(ConfigError):
        best_stride([], 0.0, 2, H100)


def test_a_card_with_a_hole_is_refused_where_it_matters() -> None:
    with pytest.raises(ConfigError, match="cpu_params_per_second"):
        predict(4, "off", rates=replace(H100, cpu_params_per_second=None))
