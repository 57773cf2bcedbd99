"""Plans as tables: which ops, in which order, waiting for what."""

from collections.abc import Sequence

import pytest

from tests.processor_time import processor_seconds
from tidegate.errors import PlanError
from tidegate.plan import Op, Placement, Plan, Policy, Subgroup, make_plan, place_subgroups, steady_placements, verify

STAY = Placement("device", "device", "device", False)
STAGED = Placement("device", "host", "host", False)
ADMIT = Placement("device", "host", "device", False)
LEAVE = Placement("device", "device", "host", False)
ON_CPU = Placement("cpu", "host", "host", True)
STALE = Placement("cpu", "host", "host", False)
EVICT = Placement("cpu", "device", "host", False)


def subgroups(count: int, numel: int = 1_000_000) -> list[Subgroup]:
    return [Subgroup(id=i, numel=numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


def plan_of(placements: Sequence[Placement], policy: Policy = "interleaved", num_slots: int = 2) -> Plan:
    plan = make_plan(subgroups(len(placements)), placements, num_slots=num_slots, policy=policy)
    verify(plan)
    return plan


def names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]


@pytest.mark.parametrize(
    ("placement", "ops"),
    [
        (ON_CPU, ["grad_d2h 0", "norm", "cpu_update 0", "weight_h2d 0"]),
        (STALE, ["weight_d2h 0", "grad_d2h 0", "norm", "cpu_update 0", "weight_h2d 0"]),
        (EVICT, ["weight_d2h 0", "state_d2h 0", "grad_d2h 0", "norm", "cpu_update 0", "weight_h2d 0"]),
        (STAGED, ["norm", "state_h2d 0 slot 0", "device_update 0 slot 0", "state_d2h 0 slot 0"]),
        (ADMIT, ["norm", "state_h2d 0", "device_update 0"]),
        (LEAVE, ["norm", "device_update 0", "state_d2h 0"]),
        (STAY, ["norm", "device_update 0"]),
    ],
)
def test_ops_of_one_subgroup(placement: Placement, ops: list[str]) -> None:
    assert names(plan_of([placement], "sequential").ops) == ops
    assert sorted(names(plan_of([placement]).ops)) == sorted(ops)


def test_interleaved_lanes() -> None:
    plan = plan_of([ON_CPU, STAGED, STALE, STAGED, EVICT, STAGED, STAY, ADMIT, LEAVE])
    assert names(plan.lanes["d2h"]) == [
        *["weight_d2h 2", "weight_d2h 4", "state_d2h 4", "grad_d2h 4", "grad_d2h 2", "grad_d2h 0"],
        *["state_d2h 1 slot 0", "state_d2h 3 slot 1", "state_d2h 5 slot 0", "state_d2h 8"],
    ]
    assert names(plan.lanes["cpu"]) == ["cpu_update 0", "cpu_update 2", "cpu_update 4"]
    assert names(plan.lanes["device"]) == [
        *["norm", "device_update 1 slot 0", "device_update 3 slot 1", "device_update 5 slot 0"],
        *["device_update 7", "device_update 8", "device_update 6"],
    ]
    assert names(plan.lanes["h2d"])[:3] == ["state_h2d 1 slot 0", "state_h2d 3 slot 1", "state_h2d 7"]


def test_dependencies_say_only_what_lanes_do_not() -> None:
    plan = plan_of([STAGED, STAGED, ON_CPU], num_slots=1)
    waits = {op.name: [plan.by_id[dep].name for dep in op.deps] for op in plan.ops}
    assert waits == {
        "grad_d2h 2": [],
        "norm": [],
        "state_h2d 0 slot 0": [],
        "device_update 0 slot 0": ["state_h2d 0 slot 0"],
        "state_d2h 0 slot 0": ["device_update 0 slot 0"],
        "state_h2d 1 slot 0": ["state_d2h 0 slot 0"],
        "device_update 1 slot 0": ["state_h2d 1 slot 0"],
        "state_d2h 1 slot 0": ["device_update 1 slot 0"],
        "cpu_update 2": ["grad_d2h 2", "norm"],
        "weight_h2d 2": ["cpu_update 2"],
    }


def test_sequential_goes_by_id_and_residents_come_last() -> None:
    plan = plan_of([STAY, STAGED, ON_CPU], "sequential")
    assert names(plan.ops) == [
        *["grad_d2h 2", "norm", "state_h2d 1 slot 0", "device_update 1 slot 0", "state_d2h 1 slot 0"],
        *["cpu_update 2", "weight_h2d 2", "device_update 0"],
    ]


def test_twinflow_updates_residents_first() -> None:
    plan = plan_of([ON_CPU, ON_CPU, STAY], "twinflow")
    assert names(plan.ops) == [
        *["grad_d2h 1", "grad_d2h 0", "norm", "device_update 2"],
        *["cpu_update 0", "weight_h2d 0", "cpu_update 1", "weight_h2d 1"],
    ]


def test_gradients_follow_the_order_given() -> None:
    placements = [ON_CPU, STAGED, ON_CPU, ON_CPU]
    plan = make_plan(subgroups(4), placements, num_slots=1, grad_on_host_order=[2, 1, 0, 3])
    verify(plan)
    assert names(plan.lanes["d2h"])[:3] == ["grad_d2h 2", "grad_d2h 0", "grad_d2h 3"]


class SlowCpu:
    def seconds(self, op: Op, /) -> float:
        return 100.0 if op.lane == "cpu" else 1.0


class SlowDevice:
    def seconds(self, op: Op, /) -> float:
        return 100.0 if op.lane == "device" else 1.0


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        # Weights that are late let all fetches pass; fetches whose slot frees late let all weights pass.
        (SlowCpu(), ["state_h2d 1", "state_h2d 3", "state_h2d 5", "weight_h2d 0", "weight_h2d 2", "weight_h2d 4"]),
        (SlowDevice(), ["state_h2d 1", "weight_h2d 0", "weight_h2d 2", "weight_h2d 4", "state_h2d 3", "state_h2d 5"]),
    ],
)
def test_h2d_has_no_head_of_line_blocking(clock: SlowCpu | SlowDevice, expected: list[str]) -> None:
    placements = steady_placements(place_subgroups(6, stride=2, static_ratio=0.0))
    plan = make_plan(subgroups(6), placements, num_slots=1, rates=clock)
    verify(plan)
    assert [name.removesuffix(" slot 0") for name in names(plan.lanes["h2d"])] == expected


@pytest.mark.parametrize(
    ("rule", "placements", "num_slots", "policy", "order"),
    [
        ("slots", [STAGED], 0, "interleaved", None),
        ("policy", [STAGED], 2, "twinflow", None),
        ("placement", [Placement("cpu", "host", "device", True)], 2, "interleaved", None),
        ("subgroups", [ON_CPU, ON_CPU], 2, "interleaved", None),
        ("gradient order", [ON_CPU], 2, "interleaved", []),
        ("gradient order", [ON_CPU], 2, "interleaved", [0, 0]),
    ],
)
def test_what_cannot_be_planned(
    rule: str, placements: list[Placement], num_slots: int, policy: Policy, order: list[int] | None
) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(subgroups(1), placements, num_slots=num_slots, policy=policy, grad_on_host_order=order)
    assert caught.value.rule == rule


def test_ids_must_count_up() -> None:
    with pytest.raises(PlanError, match="in order"):
        make_plan(subgroups(2)[::-1], [ON_CPU, ON_CPU], num_slots=2)


@pytest.mark.parametrize("stride", ["off", 1, 2])
@pytest.mark.parametrize("policy", ["interleaved", "sequential"])
def test_3000_subgroups_are_planned_and_verified_in_seconds(stride: float, policy: Policy) -> None:
    def plan(count: int) -> None:
        placements = steady_placements(place_subgroups(count, stride=stride, static_ratio=0.1))
        verify(make_plan(subgroups(count), placements, num_slots=2, policy=policy))

    few, many = (processor_seconds(lambda count=count: plan(count)) for count in (300, 3000))
    assert many < 2.0
    assert many / few < 30, "10 if the time grew with the number of subgroups, 100 if with its square"
