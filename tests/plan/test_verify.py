"""Every plan of the planner passes, and every damaged one is refused."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import PlanError
from tidegate.plan import Op, OpKind, Placement, Plan, Subgroup, make_plan, place_subgroups, steady_placements, verify

TRANSITIONS = [
    ("cpu", "host", "host"),
    ("cpu", "device", "host"),
    ("device", "host", "host"),
    ("device", "host", "device"),
    ("device", "device", "host"),
    ("device", "device", "device"),
]
# Byte counts all differ, and none is 0: a wrong count never equals a right one by chance.
sizes = st.builds(
    lambda numel, weight, state: (numel, weight, weight + 1, state),
    st.integers(1, 1000),
    st.sampled_from([2, 4]),
    st.sampled_from([10, 12]),
)


class AnyClock:
    """Run times that have nothing to do with size, 0 among them: order may depend on them, correctness may not."""

    def __init__(self, seconds: list[float]) -> None:
        self.times = seconds

    def seconds(self, op: Op, /) -> float:
        return self.times[(7 * op.subgroup + len(op.kind)) % len(self.times)]


@st.composite
def plans(draw: st.DrawFn, min_subgroups: int = 0) -> Plan:
    count = draw(st.integers(min_subgroups, 9))
    shapes = draw(st.lists(sizes, min_size=count, max_size=count))
    subgroups = [Subgroup(i, *shape) for i, shape in enumerate(shapes)]
    policy = draw(st.sampled_from(["interleaved", "interleaved", "sequential", "twinflow"]))
    moves = [move for move in TRANSITIONS if policy != "twinflow" or move != ("device", "host", "host")]
    if draw(st.booleans()):
        knobs = {"stride": "off" if policy == "twinflow" else draw(st.floats(1, 5)), "ratio": draw(st.floats(0, 1))}
        placements = steady_placements(place_subgroups(count, stride=knobs["stride"], static_ratio=knobs["ratio"]))
    else:
        placements = tuple(
            Placement(*draw(st.sampled_from(moves)), draw(st.booleans()))  # type: ignore[arg-type]
            for _ in range(count)
        )
    if draw(st.booleans()):
        placements = tuple(replace(p, spilled=p.is_staged and draw(st.booleans())) for p in placements)
    return make_plan(
        subgroups,
        placements,
        num_slots=draw(st.integers(1, 4)),
        policy=policy,
        grad_on_host_order=draw(st.none() | st.permutations(range(count))),
        rates=draw(st.none() | st.builds(AnyClock, st.lists(st.floats(0, 9), min_size=1, max_size=9))),
        norms=draw(st.sampled_from(["step", "gradient"])),
    )


def with_op(plan: Plan, op: Op) -> Plan:
    return replace(plan, ops=tuple(op if old.id == op.id else old for old in plan.ops))


def renumbered(plan: Plan, ops: Iterable[Op]) -> Plan:
    """`ops` with ids 0, 1, 2, … again; dependencies on what is gone are gone."""
    ops = tuple(ops)
    new_id: dict[int, int] = {}
    for position, op in enumerate(ops):
        new_id.setdefault(op.id, position)
    fixed = (replace(op, id=i, deps=tuple(new_id[d] for d in op.deps if d in new_id)) for i, op in enumerate(ops))
    return replace(plan, ops=tuple(fixed))


def without_a_dependency(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        for dep in op.deps:
            yield with_op(plan, replace(op, deps=tuple(d for d in op.deps if d != dep)))


def with_two_swapped(plan: Plan, field: str) -> Iterable[Plan]:
    """Two ops with each other's value of a field."""
    for a in plan.ops:
        for b in plan.ops[a.id + 1 :]:
            of_a, of_b = getattr(a, field), getattr(b, field)
            if of_a != of_b:
                yield with_op(with_op(plan, replace(a, **{field: of_b})), replace(b, **{field: of_a}))


def with_one_changed(plan: Plan, field: str, values: Iterable[object]) -> Iterable[Plan]:
    """One op with another value of a field."""
    values = list(values)
    for op in plan.ops:
        for value in values:
            if value != getattr(op, field):
                yield with_op(plan, replace(op, **{field: value}))  # type: ignore[arg-type]


def with_two_slots_swapped(plan: Plan) -> Iterable[Plan]:
    return with_two_swapped(plan, "slot")


def with_a_slot_changed(plan: Plan) -> Iterable[Plan]:
    return with_one_changed(plan, "slot", [None, *range(-1, plan.num_slots + 1)])


def without_an_op(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        rest = [other for other in plan.ops if other is not op]
        yield replace(plan, ops=tuple(rest)) if op.id < len(rest) else renumbered(plan, rest)
        yield renumbered(plan, rest)


def without_a_subgroup(plan: Plan) -> Iterable[Plan]:
    for i in range(len(plan.subgroups)):
        subgroups = tuple(s for s in plan.subgroups if s.id != i)
        placements = plan.placements[:i] + plan.placements[i + 1 :]
        yield replace(plan, subgroups=subgroups)
        yield replace(plan, subgroups=subgroups, placements=placements)
        yield renumbered(plan, (op for op in plan.ops if op.subgroup != i))


def with_an_op_doubled(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        yield replace(plan, ops=(*plan.ops, op))
        yield renumbered(plan, [*plan.ops[: op.id + 1], *plan.ops[op.id :]])
        yield replace(plan, ops=(*plan.ops, replace(op, id=len(plan.ops))))


def with_an_update_on_the_wrong_processor(plan: Plan) -> Iterable[Plan]:
    other = {OpKind.CPU_UPDATE: OpKind.DEVICE_UPDATE, OpKind.DEVICE_UPDATE: OpKind.CPU_UPDATE}
    for op in plan.of_kind(*other):
        yield with_op(plan, replace(op, kind=other[op.kind]))
        if op.slot is not None:
            yield with_op(plan, replace(op, kind=other[op.kind], slot=None))


def with_a_placement_changed(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        changes = [Placement(*move, placement.mirror_valid) for move in TRANSITIONS]  # type: ignore[arg-type]
        if placement.processor == "cpu":
            changes.append(replace(placement, mirror_valid=not placement.mirror_valid))
        for changed in changes:
            if changed != placement:
                yield replace(plan, placements=(*plan.placements[:i], changed, *plan.placements[i + 1 :]))


def with_a_gradient_from_elsewhere(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        changed = replace(placement, spilled=not placement.spilled)
        yield replace(plan, placements=(*plan.placements[:i], changed, *plan.placements[i + 1 :]))
    for op in plan.ops:
        yield with_op(plan, replace(op, spilled=not op.spilled))


def with_squares_summed_at_another_time(plan: Plan) -> Iterable[Plan]:
    yield replace(plan, norms="step" if plan.norms == "gradient" else "gradient")


def with_a_wrong_size(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        yield with_op(plan, replace(op, nbytes=op.nbytes + 1))
        yield with_op(plan, replace(op, numel=op.numel + 1))


def with_a_dependency_on_itself_or_later(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        for dep in (op.id, op.id + 1, -1):
            yield with_op(plan, replace(op, deps=(*op.deps, dep)))


def with_a_wrong_subgroup(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        for subgroup in range(-2, len(plan.subgroups) + 1):
            if subgroup != op.subgroup:
                yield with_op(plan, replace(op, subgroup=subgroup))


DAMAGES = [
    without_a_dependency,
    with_two_slots_swapped,
    with_a_slot_changed,
    without_an_op,
    without_a_subgroup,
    with_an_op_doubled,
    with_an_update_on_the_wrong_processor,
    with_a_placement_changed,
    with_a_gradient_from_elsewhere,
    with_squares_summed_at_another_time,
    with_a_wrong_size,
    with_a_dependency_on_itself_or_later,
    with_a_wrong_subgroup,
]


@settings(max_examples=examples(300))
@given(plan=plans())
def test_every_plan_is_correct(plan: Plan) -> None:
    verify(plan)


@pytest.mark.parametrize("damage", DAMAGES)
@settings(max_examples=examples(60))
@given(plan=plans(min_subgroups=1))
def test_damage_is_refused(damage: Callable[[Plan], Iterable[Plan]], plan: Plan) -> None:
    for damaged in damage(plan):
        with pytest.raises(PlanError):
            verify(damaged)


@settings(max_examples=examples(50))
@given(plan=plans())
def test_plans_are_deterministic(plan: Plan) -> None:
    one, two = (
        make_plan(plan.subgroups, plan.placements, num_slots=plan.num_slots, policy=plan.policy) for _ in range(2)
    )
    assert one == two


def ready_made() -> Plan:
    """c d c R, with two slots."""
    subgroups = [Subgroup(i, 10, 2, 3, 12) for i in range(4)]
    return make_plan(subgroups, steady_placements(place_subgroups(4, stride=2, static_ratio=0.25)), num_slots=2)


def with_a_gradient_after_the_norm(plan: Plan) -> Plan:
    norm = next(plan.of_kind(OpKind.NORM))
    late = next(op for op in plan.ops if op.name == "grad_d2h 0")
    rest = [op for op in plan.ops if op is not late]
    place_of_norm = rest.index(norm)
    late = replace(late, deps=(norm.id,))
    return renumbered(plan, [*rest[: place_of_norm + 1], late, *rest[place_of_norm + 1 :]])


def with_a_needless_copy(plan: Plan) -> Plan:
    stale = [replace(placement, mirror_valid=False) for placement in plan.placements]
    return replace(make_plan(plan.subgroups, stale, num_slots=2), placements=plan.placements)


@pytest.mark.parametrize(
    ("rule", "damaged"),
    [
        ("gate", with_a_gradient_after_the_norm),
        ("waste", with_a_needless_copy),
        ("once", lambda plan: renumbered(plan, (op for op in plan.ops if op.kind is not OpKind.NORM))),
        ("race", lambda plan: with_op(plan, replace(next(plan.of_kind(OpKind.CPU_UPDATE)), deps=()))),
        ("content", lambda plan: renumbered(plan, (op for op in plan.ops if op.kind is not OpKind.WEIGHT_H2D))),
        ("ids", lambda plan: replace(plan, ops=plan.ops[1:])),
        ("slots", lambda plan: replace(plan, num_slots=0)),
        ("serial", lambda plan: replace(plan, policy="sequential")),
        ("subgroups", lambda plan: replace(plan, subgroups=plan.subgroups[1:])),
        ("processor", lambda plan: renumbered(plan, (op for op in plan.ops if op.kind is not OpKind.CPU_UPDATE))),
    ],
)
def test_the_error_names_the_rule(rule: str, damaged: Callable[[Plan], Plan]) -> None:
    plan = ready_made()
    with pytest.raises(PlanError) as caught:
        verify(damaged(plan))
    assert caught.value.rule == rule
