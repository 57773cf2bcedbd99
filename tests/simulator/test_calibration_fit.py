"""What steps of an engine say about rates and costs that lanes by themselves do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from tidegate.plan import Placement, Subgroup, make_plan
from tidegate.plan.ops import LANE_OF, Op, OpKind
from tidegate.plan.placement import place_subgroups, steady_placements
from tidegate.simulator.calibration_fit import MAX_FACTOR, MeasuredStep, fitted_card
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import PathRates, RateCard

CARD: Final = RateCard(
    h2d_bytes_per_second=6e9, d2h_bytes_per_second=6e9, cpu_params_per_second=1.5e9, device_params_per_second=0.8e9,
    norm_params_per_second=5e9, overhead_seconds=4e-5, step_seconds=0.5, op_seconds={"cpu": 1e-5, "h2d": 7e-5},
    keeps={"cpu": {"h2d": 0.8, "device": 0.7}},
)  # fmt: skip
NUMEL: Final = 8_000_000
BACKWARD: Final = 0.02


def steps(durations: Callable[[Op], float], beside: float = 0.0) -> list[MeasuredStep]:
    """As an engine whose ops take so long would take them; `beside`: between `step()`, its ops, and its return."""
    found = []
    for count in (4, 16):
        subgroups = [Subgroup(i, NUMEL // count, 2, 2, 10) for i in range(count)]
        for stride in ("off", 3.0):
            plan = make_plan(
                subgroups, steady_placements(place_subgroups(count, stride=stride, static_ratio=0.0)), num_slots=2
            )
            timeline = simulate(plan, CARD, step_at=BACKWARD, durations=durations)
            end = timeline.phases[-1].end
            found.append(MeasuredStep(plan, timeline.spans, BACKWARD, end + beside, BACKWARD))
    return found


def test_a_card_that_is_right_stays() -> None:
    found = fitted_card(CARD, steps(CARD.seconds, beside=0.003)).to_dict()
    assert found.pop("op_seconds") == pytest.approx({"cpu": 1e-5, "device": 0.0, "h2d": 7e-5, "d2h": 0.0}, abs=1e-12)
    assert found.pop("step_seconds") == pytest.approx(0.003)
    assert found.pop("keeps") == CARD.keeps
    assert found == {name: pytest.approx(CARD.to_dict()[name]) for name in found}


def test_a_slower_rate_and_a_cost_of_each_op_are_told_apart() -> None:
    def durations(op: Op) -> float:
        seconds = CARD.seconds(op)
        if op.kind is OpKind.CPU_UPDATE:
            return 1.2 * seconds + 3e-4
        if op.kind is OpKind.NORM:
            return 0.9 * seconds
        return seconds

    found = fitted_card(CARD, steps(durations))
    # Not exactly: an op that takes longer has other lanes beside it for another part of its time.
    assert found.cpu_params_per_second == pytest.approx(1.5e9 / 1.2, rel=0.03)
    assert found.op_seconds["cpu"] == pytest.approx(1.2 * 5e-5 + 3e-4 - 4e-5, rel=0.1)
    assert found.norm_params_per_second == pytest.approx(5e9 / 0.9)
    assert found.h2d_bytes_per_second == pytest.approx(6e9)
    assert found.op_seconds["h2d"] == pytest.approx(7e-5)
    assert found.step_seconds == pytest.approx(0.0, abs=1e-4)


def test_the_wait_at_the_end_of_a_norm_is_a_cost_of_the_step() -> None:
    """On a GPU a norm ends with a small copy, which waits: that made the norm of large models too slow."""
    waited = 0.08
    found = fitted_card(CARD, steps(lambda op: CARD.seconds(op) + (waited if op.kind is OpKind.NORM else 0.0)))
    assert found.norm_params_per_second == pytest.approx(0.8e9)
    norm = NUMEL / 0.8e9 - NUMEL / 5e9
    assert found.step_seconds == pytest.approx(waited - norm, rel=0.01)


def test_waiting_for_a_core_is_a_cost_of_the_lane_that_waits() -> None:
    """Each op of the CPU's lane begins a while after it could: that is added to what its ops take."""
    late, whole = 5e-4, steps(lambda op: CARD.seconds(op) + (5e-4 if op.kind is OpKind.CPU_UPDATE else 0.0))
    delayed = [
        replace(step, spans=[
            span._replace(start=span.start + late) if LANE_OF[span.kind] == "cpu" else span for span in step.spans
        ])
        for step in whole
    ]  # fmt: skip
    found = fitted_card(CARD, delayed)
    assert found.op_seconds["cpu"] == pytest.approx(1e-5 + late, rel=0.05)
    assert found.cpu_params_per_second == pytest.approx(1.5e9, rel=0.01)


def test_what_nobody_would_believe_is_not_believed() -> None:
    found = fitted_card(CARD, steps(lambda op: CARD.seconds(op) * (50 if op.kind is OpKind.DEVICE_UPDATE else 1)))
    assert found.device_params_per_second == pytest.approx(0.8e9 / MAX_FACTOR)


def test_without_device_updates_their_rate_stays() -> None:
    found = fitted_card(
        CARD, [step for step in steps(CARD.seconds) if not list(step.plan.of_kind(OpKind.DEVICE_UPDATE))]
    )
    assert found.device_params_per_second == CARD.device_params_per_second
    assert "device" not in found.op_seconds


def test_no_lane_is_faster_in_steps_than_alone() -> None:
    found = fitted_card(CARD, steps(lambda op: CARD.seconds(op) * (0.8 if LANE_OF[op.kind] == "h2d" else 1)))
    assert found.h2d_bytes_per_second == CARD.h2d_bytes_per_second


def path_steps(durations: Callable[[Op], float], card: RateCard) -> list[MeasuredStep]:
    found = []
    for count in (4, 16):
        subgroups = [Subgroup(i, NUMEL // count, 2, 2, 10) for i in range(count)]
        placements = [Placement("cpu", "disk", "disk", mirror_valid=False, grad_in_slot=True)] * count
        plan = make_plan(subgroups, placements, num_slots=2, host_slots={"disk": 3})
        timeline = simulate(plan, card, step_at=BACKWARD, durations=durations)
        found.append(MeasuredStep(plan, timeline.spans, BACKWARD, timeline.phases[-1].end, BACKWARD))
    return found


@pytest.mark.parametrize("factor", [1.4, 0.7])
def test_a_path_may_be_slower_or_faster_in_steps_than_by_itself(factor: float) -> None:
    """Reads take their share of writes' time and the other way round. What steps without paths say stays."""
    disk = {"disk": PathRates(read_bytes_per_second=2e9, write_bytes_per_second=1e9)}
    keeps = {**CARD.keeps, "disk:read": {"disk:write": 0.6}, "disk:write": {"disk:read": 0.5}}
    card = replace(CARD, paths=disk, keeps=keeps)

    def durations(op: Op) -> float:
        return card.seconds(op) * (factor if op.kind is OpKind.FLUSH else 1) + 1e-3 * (op.kind is OpKind.FETCH)

    found = fitted_card(card, [*steps(CARD.seconds), *path_steps(durations, card)])
    assert found.paths["disk"].write_bytes_per_second == pytest.approx(1e9 / factor, rel=0.05)
    assert found.paths["disk"].read_bytes_per_second == pytest.approx(2e9, rel=0.05)
    assert found.op_seconds["disk:read"] == pytest.approx(1e-3, rel=0.25)
    assert found.cpu_params_per_second == pytest.approx(CARD.cpu_params_per_second)
    assert found.keeps == keeps


def test_a_path_that_no_step_used_keeps_its_rates() -> None:
    card = replace(CARD, paths={"disk": PathRates(read_bytes_per_second=2e9, write_bytes_per_second=1e9)})
    assert fitted_card(card, steps(CARD.seconds)).paths == card.paths


def test_one_odd_step_in_four_does_not_move_the_fit() -> None:
    """All its ops take three times as long."""
    odd = steps(lambda op: 3 * CARD.seconds(op))
    found = fitted_card(CARD, [*steps(CARD.seconds) * 3, *odd])
    assert found.cpu_params_per_second == pytest.approx(CARD.cpu_params_per_second, rel=0.01)
    assert found.d2h_bytes_per_second == pytest.approx(CARD.d2h_bytes_per_second, rel=0.01)
