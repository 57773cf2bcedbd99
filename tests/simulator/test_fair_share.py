"""Resources that ops share: fair, full, and the same for one rank on its share as for a whole node of ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.capacity.machine import Machine, PlannedPath, Workload
from tidegate.capacity.many_ranks import MEMORY, NodeShare
from tidegate.plan import Plan, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.plan.interference import Demand, fair_speeds
from tidegate.plan.ops import CPU, DEVICE, Op, OpKind
from tidegate.plan.plan import Placement
from tidegate.simulator.event_loop import Times, times_together

DEMANDS = st.dictionaries(
    st.integers(0, 7),
    st.dictionaries(st.sampled_from(["disk", "memory", "bus"]), st.floats(0.01, 3), max_size=3),
    max_size=8,
)


@given(DEMANDS)
def test_no_resource_is_overfull_and_nobody_waits_without_one_that_is_full(demands: dict[int, Demand]) -> None:
    speeds = fair_speeds(demands)
    assert set(speeds) == set(demands)
    used = {
        resource: sum(speeds[name] * demand.get(resource, 0.0) for name, demand in demands.items())
        for resource in ("disk", "memory", "bus")
    }
    assert all(share <= 1 + 1e-9 for share in used.values())
    for name, demand in demands.items():
        assert 0 < speeds[name] <= 1
        if speeds[name] < 1:
            assert any(used[resource] > 1 - 1e-9 for resource, share in demand.items() if share > 0)


def test_what_two_share_goes_to_both_and_what_one_leaves_to_the_other() -> None:
    assert fair_speeds({"read": {"disk": 1.0}, "write": {"disk": 1.0}}) == {"read": 0.5, "write": 0.5}
    assert fair_speeds({"read": {"disk": 1.0}, "copy": {"memory": 0.9}}) == {"read": 1.0, "copy": 1.0}
    # The read takes a tenth of memory at most; the two others share what it leaves.
    found = fair_speeds({"read": {"memory": 0.1}, "update": {"memory": 1.0}, "copy": {"memory": 1.0}})
    assert found == pytest.approx({"read": 1.0, "update": 0.45, "copy": 0.45})


RANKS = 4
NODE = Machine(
    gpus=RANKS,
    host_bytes_per_second=120e9,
    cpu_params_per_second=4e9,
    paths=(
        PlannedPath(name="nvme", read_bytes_per_second=8e9, write_bytes_per_second=6e9),
        PlannedPath(name="pfs", read_bytes_per_second=4e9, write_bytes_per_second=4e9, duplex=True),
    ),
)


def rank_plan(count: int, stride: float, stored: int) -> Plan:
    """Of which the first `stored` subgroups live on the two paths in turns."""
    subgroups = [Subgroup(i, 100_000_000, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]
    placements = list(steady_placements(place_subgroups(count, stride=stride, static_ratio=0.0)))
    for i in range(stored):
        processor = placements[i].processor
        home = ("nvme", "pfs")[i % 2]
        placements[i] = Placement(processor, home, home, mirror_valid=False, grad_in_slot=processor == "cpu")
    return make_plan(subgroups, placements, num_slots=2, host_slots={"nvme": 3, "pfs": 3})


def whole_node(op: Op) -> tuple[float, Demand]:
    """Seconds and demand of an op that has the node to itself, from the machine's own figures."""
    share = NodeShare(NODE, Workload())
    if op.lane == DEVICE:
        return share.card.seconds(op), {}
    if op.kind is OpKind.CPU_UPDATE:
        seconds = op.numel / 4e9
        return seconds, {CPU: 1.0, MEMORY: op.numel * share.touched_bytes / seconds / 120e9}
    if op.path is None:
        seconds = op.nbytes / 25e9
        return seconds, {MEMORY: op.nbytes / seconds / 120e9}
    path = NODE.by_name[op.path]
    rate = path.read_bytes_per_second if op.kind is OpKind.FETCH else path.write_bytes_per_second
    return op.nbytes / rate, {MEMORY: rate / 120e9, (op.lane if path.duplex else op.path): 1.0}


def node_times(plans: list[Plan], gate: Callable[[Op], float]) -> list[tuple[Times, Times]]:
    """Of ranks that take turns on the whole node: a path that is not duplex is one resource of all reads and writes."""
    return times_together(plans, lambda op: whole_node(op)[0], gate, {}, lambda op: whole_node(op)[1])


@pytest.mark.parametrize(("stride", "stored"), [(2.0, 0), (3.0, 8), (2.0, 12), (1.0, 5)])
def test_one_rank_on_its_share_does_what_four_on_the_node_do(stride: float, stored: int) -> None:
    plan = rank_plan(12, stride, stored)
    share = NodeShare(NODE, Workload())

    def gate(op: Op) -> float:
        return 0.2 if op.gate == "step" else 0.0

    [(starts, ends)] = times_together([plan], share.card.seconds, gate, share.card.keeps, share.demand)
    for its_starts, its_ends in node_times([plan] * RANKS, gate):
        assert its_starts == pytest.approx(starts)
        assert its_ends == pytest.approx(ends)


def test_a_rank_with_less_to_do_is_done_sooner_and_leaves_its_share() -> None:
    long, short = rank_plan(12, 2.0, 8), rank_plan(6, 2.0, 4)

    def end(plans: list[Plan]) -> list[float]:
        return [max(ends.values()) for _, ends in node_times(plans, lambda _: 0.0)]

    both, uneven = end([long, long]), end([long, short])
    assert uneven[1] < uneven[0] < both[0]


@settings(max_examples=examples(20))
@given(st.integers(1, 10), st.sampled_from([1.0, 1.5, 2.0, 4.0]), st.data())
def test_order_lanes_and_dependencies_hold_and_equal_runs_are_equal(
    count: int, stride: float, data: st.DataObject
) -> None:
    plan = rank_plan(count, stride, data.draw(st.integers(0, count)))
    share = NodeShare(NODE, Workload())
    runs = [times_together([plan], share.card.seconds, lambda _: 0.0, share.card.keeps, share.demand) for _ in range(2)]
    assert runs[0] == runs[1]
    [(starts, ends)] = runs[0]
    for op in plan.ops:
        assert ends[op.id] - starts[op.id] >= share.card.seconds(op) * (1 - 1e-9)
        assert all(ends[dep] <= starts[op.id] for dep in op.deps)
    for ops in plan.lanes.values():
        for one, following in pairwise(ops):
            assert ends[one.id] <= starts[following.id]
