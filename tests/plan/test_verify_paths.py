"""Plans with paths: every one of the planner passes, and every damaged one is refused."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.plan.test_verify import DAMAGES, AnyClock, renumbered, sizes, with_one_changed, with_op, with_two_swapped
from tidegate.errors import PlanError
from tidegate.plan import Op, OpKind, Placement, Plan, Subgroup, effects, make_plan, verify
from tidegate.plan.dependencies import with_dependencies
from tidegate.plan.ops import LANES, path_lanes
from tidegate.plan.plan import Policy
from tidegate.plan.verify import _happens_before

PATHS = ("nvme", "pfs")
RESIDENCES = ("device", "host", *PATHS)
MOVES = [("device", before, after) for before in RESIDENCES for after in RESIDENCES]
MOVES += [("cpu", before, after) for before in RESIDENCES for after in RESIDENCES if after != "device"]


@st.composite
def placements(draw: st.DrawFn, policy: Policy, norms: str) -> Placement:
    placement = Placement(*draw(st.sampled_from(MOVES)), mirror_valid=False)  # type: ignore[arg-type]
    if placement.is_staged and policy == "twinflow":
        placement = replace(placement, processor="cpu")
    on_cpu = placement.processor == "cpu"
    weight_in_slot = on_cpu and not placement.uses_host_slot and draw(st.booleans())
    return replace(
        placement,
        weight_in_slot=weight_in_slot,
        mirror_valid=draw(st.booleans()) and not (on_cpu and placement.uses_host_slot) and not weight_in_slot,
        spilled=(spilled := draw(st.booleans()) and placement.is_staged),
        grad_in_slot=norms == "step" and placement.uses_host_slot and (on_cpu or spilled) and draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn, min_subgroups: int = 0) -> Plan:
    count = draw(st.integers(min_subgroups, 9))
    shapes = draw(st.lists(sizes, min_size=count, max_size=count))
    policy = draw(st.sampled_from(["interleaved", "interleaved", "sequential", "twinflow"]))
    norms = draw(st.sampled_from(["step", "gradient"]))
    return make_plan(
        [Subgroup(i, *shape) for i, shape in enumerate(shapes)],
        draw(st.lists(placements(policy, norms), min_size=count, max_size=count)),
        num_slots=draw(st.integers(1, 3)),
        policy=policy,
        grad_on_host_order=draw(st.none() | st.permutations(range(count))),
        rates=draw(st.none() | st.builds(AnyClock, st.lists(st.floats(0, 9), min_size=1, max_size=9))),
        norms=norms,  # type: ignore[arg-type]
        host_slots={path: draw(st.integers(1, 3)) for path in PATHS},
        weight_slots=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["ascending", "descending"])),
    )


def with_two_host_slots_swapped(plan: Plan) -> Iterable[Plan]:
    return with_two_swapped(plan, "host_slot")


def with_a_host_slot_changed(plan: Plan) -> Iterable[Plan]:
    return with_one_changed(plan, "host_slot", [None, *range(-1, plan.num_host_slots + 1)])


def with_two_weight_slots_swapped(plan: Plan) -> Iterable[Plan]:
    return with_two_swapped(plan, "weight_slot")


def with_a_weight_slot_changed(plan: Plan) -> Iterable[Plan]:
    return with_one_changed(plan, "weight_slot", [None, *range(-1, plan.num_weight_slots + 1)])


def with_a_weight_in_another_place(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        yield with_placement(plan, i, replace(placement, weight_in_slot=not placement.weight_in_slot))


def with_another_path(plan: Plan) -> Iterable[Plan]:
    return with_one_changed(plan, "path", (None, *PATHS, "elsewhere"))


def with_a_copy_the_wrong_way(plan: Plan) -> Iterable[Plan]:
    other = {OpKind.FETCH: OpKind.FLUSH, OpKind.FLUSH: OpKind.FETCH}
    for op in plan.of_kind(*other):
        yield with_op(plan, replace(op, kind=other[op.kind]))


def with_a_gradient_in_another_place(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        yield with_op(plan, replace(op, grad_in_slot=not op.grad_in_slot))
    for i, placement in enumerate(plan.placements):
        yield with_placement(plan, i, replace(placement, grad_in_slot=not placement.grad_in_slot))


def with_state_from_or_to_elsewhere(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        for processor, before, after in [*MOVES, ("device", "elsewhere", placement.after)]:
            changed = replace(placement, processor=processor, before=before, after=after)  # type: ignore[arg-type]
            if changed != placement:
                yield with_placement(plan, i, changed)


def with_a_mirror_of_what_is_updated_in_a_slot(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        if placement.uses_host_slot and placement.processor == "cpu":
            yield with_placement(plan, i, replace(placement, mirror_valid=True))


def with_paths_and_slots_that_are_not_there(plan: Plan) -> Iterable[Plan]:
    used = {op.path for op in plan.ops if op.path}
    yield replace(plan, paths=(*plan.paths, plan.paths[0]))
    yield replace(plan, paths=(*plan.paths, "host"))
    yield from (replace(plan, paths=tuple(path for path in plan.paths if path != gone)) for gone in used)
    slots = [op.host_slot for op in plan.ops if op.host_slot is not None]
    if slots:
        yield replace(plan, num_host_slots=max(slots))
    slots = [op.weight_slot for op in plan.ops if op.weight_slot is not None]
    if slots:
        yield replace(plan, num_weight_slots=max(slots))


def with_placement(plan: Plan, subgroup: int, placement: Placement) -> Plan:
    return replace(plan, placements=(*plan.placements[:subgroup], placement, *plan.placements[subgroup + 1 :]))


TIER_DAMAGES = [
    with_two_host_slots_swapped,
    with_a_host_slot_changed,
    with_two_weight_slots_swapped,
    with_a_weight_slot_changed,
    with_a_weight_in_another_place,
    with_another_path,
    with_a_copy_the_wrong_way,
    with_a_gradient_in_another_place,
    with_state_from_or_to_elsewhere,
    with_a_mirror_of_what_is_updated_in_a_slot,
    with_paths_and_slots_that_are_not_there,
]


@settings(max_examples=examples(400))
@given(plan=plans())
def test_every_plan_is_correct(plan: Plan) -> None:
    verify(plan)


@pytest.mark.parametrize("damage", [*DAMAGES, *TIER_DAMAGES])
@settings(max_examples=examples(60))
@given(plan=plans(min_subgroups=1))
def test_damage_is_refused(damage: Callable[[Plan], Iterable[Plan]], plan: Plan) -> None:
    for damaged in damage(plan):
        with pytest.raises(PlanError):
            verify(damaged)


@settings(max_examples=examples(200))
@given(plan=plans(), random=st.randoms(use_true_random=False))
def test_ops_that_meet_are_never_in_progress_at_once(plan: Plan, random: Random) -> None:
    """Lanes of paths begin as much as dependencies let them, and end it in order; any lane may be fast or slow."""
    waiting = {lane: deque(ops) for lane, ops in plan.lanes.items() if ops}
    running: dict[str, deque[Op]] = {lane: deque() for lane in waiting}
    ended: set[int] = set()
    while len(ended) < len(plan.ops):
        may_begin = [
            lane for lane, ops in waiting.items()
            if ops and set(ops[0].deps) <= ended and (ops[0].may_run_ahead or not running[lane])
        ]  # fmt: skip
        lane = random.choice([*may_begin, *(lane for lane in running if running[lane])])
        if lane in may_begin and (not running[lane] or random.random() < 0.8):
            op = waiting[lane].popleft()
            reads, writes = effects(op, len(plan.subgroups), plan.norms)
            for other in (one for ops in running.values() for one in ops):
                others_reads, others_writes = effects(other, len(plan.subgroups), plan.norms)
                assert not writes & (others_reads | others_writes), (op.name, other.name)
                assert not reads & others_writes, (op.name, other.name)
            running[lane].append(op)
        else:
            ended.add(running[lane].popleft().id)


@pytest.mark.parametrize(("kind", "path", "expected"), [(OpKind.FETCH, "nvme", (0,)), (OpKind.WEIGHT_D2H, None, ())])
def test_only_the_order_of_lanes_that_never_run_ahead_stands_for_a_dependency(
    kind: OpKind, path: str | None, expected: tuple[int, ...]
) -> None:
    into_one_slot = [Op(-1, kind, i, 50, 0, path=path, host_slot=0) for i in range(2)]
    lanes = (*LANES, *path_lanes("nvme"))
    assert with_dependencies(into_one_slot, lanes, 2, "step", chain=False)[1].deps == expected


def test_a_fetch_that_begins_says_nothing_of_the_one_before() -> None:
    """It is in order when both have ended."""
    tiered = Placement("cpu", "nvme", "nvme", False)
    plan = make_plan([Subgroup(i, 5, 2, 2, 10) for i in range(2)], [tiered] * 2, num_slots=0, host_slots={"nvme": 2})
    before = _happens_before(plan)
    first, second = (op.id for op in plan.of_kind(OpKind.FETCH))
    update = next(op.id for op in plan.of_kind(OpKind.CPU_UPDATE) if second in op.deps)
    assert not before(first, second)
    assert before(first, update)


@settings(max_examples=examples(100))
@given(plan=plans())
def test_compute_does_no_io(plan: Plan) -> None:
    """What touches a path is on a lane of that path, and nothing else is."""
    for op in plan.ops:
        reads, writes = effects(op, len(plan.subgroups), plan.norms)
        touched = {name.removeprefix("path:") for name, _ in reads | writes if name.startswith("path:")}
        assert touched == ({op.lane.rpartition(":")[0]} if ":" in op.lane else set())


def tiered() -> Plan:
    """Three that share the one host slot of a path, updated on the CPU."""
    return make_plan(
        [Subgroup(i, 10, 2, 3, 12) for i in range(3)],
        [Placement("cpu", "nvme", "nvme", False, grad_in_slot=True)] * 3,
        num_slots=1,
        host_slots={"nvme": 1},
    )


def with_a_gradient_behind_one_that_waits_for_a_slot(plan: Plan) -> Plan:
    """The last gradient has a place of its own, and still stands behind what waits for the step."""
    last = len(plan.subgroups) - 1
    own = with_placement(plan, last, replace(plan.placements[last], grad_in_slot=False))
    for op in plan.of_kind(OpKind.GRAD_D2H, OpKind.CPU_UPDATE):
        if op.subgroup == last:
            host_slot = None if op.kind is OpKind.GRAD_D2H else op.host_slot
            own = with_op(own, replace(op, grad_in_slot=False, host_slot=host_slot))
    return own


@pytest.mark.parametrize(
    ("rule", "damaged"),
    [
        ("gate", with_a_gradient_behind_one_that_waits_for_a_slot),
        ("placement", lambda plan: replace(plan, norms="gradient")),
        ("content", lambda plan: renumbered(plan, (op for op in plan.ops if op.name != "flush 2 nvme host slot 0"))),
        ("placement", lambda plan: with_placement(plan, 0, replace(plan.placements[0], mirror_valid=True))),
        ("paths", lambda plan: replace(plan, paths=())),
        ("slots", lambda plan: replace(plan, num_host_slots=0)),
        ("race", lambda plan: with_op(plan, replace(list(plan.of_kind(OpKind.FETCH))[-1], deps=()))),
    ],
)
def test_the_error_names_the_rule(rule: str, damaged: Callable[[Plan], Plan]) -> None:
    plan = tiered()
    verify(plan)
    with pytest.raises(PlanError) as caught:
        verify(damaged(plan))
    assert caught.value.rule == rule


def test_a_fetch_from_a_path_without_that_subgroup_is_refused() -> None:
    plan = make_plan(
        [Subgroup(0, 10, 2, 3, 12)], [Placement("cpu", "nvme", "pfs", False)],
        num_slots=1, host_slots={"nvme": 1, "pfs": 1},
    )  # fmt: skip
    fetch = next(plan.of_kind(OpKind.FETCH))
    with pytest.raises(PlanError, match=r"copies the state from \('path:pfs', 0\), which holds None") as caught:
        verify(with_op(plan, replace(fetch, path="pfs")))
    assert caught.value.rule == "content"
