"""Deferred flushes: which subgroups are deferred, where their state waits, and that only correct plans pass."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.plan import test_verify, test_verify_paths
from tests.plan.test_verify import AnyClock, with_one_changed, with_op, with_two_swapped
from tests.plan.test_verify_paths import with_paths_and_slots_that_are_not_there, with_placement
from tidegate.errors import PlanError
from tidegate.plan import Placement, Plan, Subgroup, make_plan, verify
from tidegate.plan.deferral import UPDATES_AHEAD, deferrable_bytes, gradient_memory, with_deferred_flushes
from tidegate.plan.gradient_memory import GradientMemory
from tidegate.plan.path_times import PathOpTimes
from tidegate.plan.slot_sizes import PAGE_BYTES
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.simulate import simulate, update_seconds
from tidegate.speeds.rate_card import PathRates, RateCard

ON_PATH = Placement("cpu", "nvme", "nvme", False)
CACHED = Placement("cpu", "host", "host", False, weight_in_slot=True)
STAGED = Placement("device", "nvme", "nvme", False)
PAGES = 1024
"""Parameters of which a gradient in fp32 takes one page."""


def fp32(count: int, pages: int = 2) -> list[Subgroup]:
    return [Subgroup(i, pages * PAGES, 4, 4, 8) for i in range(count)]


def deferred_ids(placements: Iterable[Placement]) -> list[int]:
    return [i for i, placement in enumerate(placements) if placement.deferred]


@st.composite
def deferring(draw: st.DrawFn) -> Plan:
    """A plan with at least one deferred flush, if there is room for it."""
    count = draw(st.integers(7, 10))
    bytes_of = draw(st.sampled_from([(4, 4, 8), (2, 2, 10), (2, 4, 12)]))
    groups = [Subgroup(i, draw(st.integers(1, 900)), *bytes_of) for i in range(count)]
    kinds = st.sampled_from(
        [ON_PATH] * 8 + [replace(ON_PATH, after="pfs"), replace(ON_PATH, before="pfs"), CACHED, STAGED]
    )
    order = draw(st.sampled_from(["ascending", "descending"]))
    ids = range(count) if order == "ascending" else range(count)[::-1]
    most = draw(st.sampled_from([{"nvme": 10**9, "pfs": 10**9}, {"nvme": 10_000}, {"pfs": 10**9}]))
    placements = with_deferred_flushes(groups, draw(st.lists(kinds, min_size=count, max_size=count)), ids, most)
    return make_plan(
        groups,
        placements,
        num_slots=draw(st.integers(1, 3)),
        rates=draw(st.none() | st.builds(AnyClock, st.lists(st.floats(0, 9), min_size=1, max_size=9))),
        norms="gradient",
        host_slots={path: draw(st.integers(1, 3)) for path in ("nvme", "pfs")},
        order=order,  # type: ignore[arg-type]
    )


def with_a_deferred_slot_changed(plan: Plan) -> Iterable[Plan]:
    slots = 0 if plan.gradient_memory is None else len(plan.gradient_memory.slots)
    return with_one_changed(plan, "deferred_slot", [None, *range(-1, slots + 1)])


def with_two_deferred_slots_swapped(plan: Plan) -> Iterable[Plan]:
    return with_two_swapped(plan, "deferred_slot")


def with_other_gradients_covered(plan: Plan) -> Iterable[Plan]:
    for op in plan.ops:
        if op.covers:
            yield with_op(plan, replace(op, covers=op.covers[1:]))
        yield with_op(plan, replace(op, covers=(*op.covers, op.subgroup)))


def with_other_memory(plan: Plan) -> Iterable[Plan]:
    memory = plan.gradient_memory
    if memory is None:
        return
    yield replace(plan, gradient_memory=None)
    yield replace(plan, gradient_memory=replace(memory, sizes=memory.sizes[1:]))
    yield replace(plan, gradient_memory=replace(memory, sizes=(*memory.sizes, memory.sizes[0])))
    yield replace(plan, gradient_memory=replace(memory, weight_slots=()))
    yield replace(plan, gradient_memory=replace(memory, slots=memory.slots[1:]))
    for turn, slot in enumerate(memory.slots):
        for changed in (
            slot._replace(offset=slot.offset - PAGE_BYTES), slot._replace(nbytes=0), slot._replace(covers=()),
            slot._replace(offset=memory.nbytes),
        ):  # fmt: skip
            slots = (*memory.slots[:turn], changed, *memory.slots[turn + 1 :])
            yield replace(plan, gradient_memory=replace(memory, slots=slots))
    if len(memory.slots) > 1:
        one = memory.slots[0]
        yield replace(plan, gradient_memory=replace(memory, slots=(one,) * len(memory.slots)))


def with_another_subgroup_deferred(plan: Plan) -> Iterable[Plan]:
    for i, placement in enumerate(plan.placements):
        yield with_placement(plan, i, replace(placement, deferred=not placement.deferred))


@settings(max_examples=examples(200))
@given(plan=deferring())
def test_every_plan_is_correct(plan: Plan) -> None:
    verify(plan)


DAMAGES = [
    *test_verify.DAMAGES,
    *(damage for damage in test_verify_paths.TIER_DAMAGES if damage is not with_paths_and_slots_that_are_not_there),
    with_a_deferred_slot_changed,
    with_two_deferred_slots_swapped,
    with_other_gradients_covered,
    with_other_memory,
    with_another_subgroup_deferred,
]


@pytest.mark.parametrize("damage", DAMAGES)
@settings(max_examples=examples(20))
@given(plan=deferring())
def test_damage_is_refused(damage: Callable[[Plan], Iterable[Plan]], plan: Plan) -> None:
    for damaged in damage(plan):
        with pytest.raises(PlanError):
            verify(damaged)


@settings(max_examples=examples(100))
@given(plan=deferring(), random=st.randoms(use_true_random=False))
def test_ops_that_meet_are_never_in_progress_at_once(plan: Plan, random: Random) -> None:
    test_verify_paths.test_ops_that_meet_are_never_in_progress_at_once.hypothesis.inner_test(plan, random)  # type: ignore[attr-defined]


EVENLY = [(0, []), (1, [29]), (2, [14, 29]), (3, [9, 19, 29]), (5, [7, 11, 17, 23, 29]), (6, [7, 9, 14, 19, 24, 29])]


@pytest.mark.parametrize(("count", "expected"), EVENLY)
def test_as_many_as_the_path_can_write_meanwhile_are_deferred_evenly_spread(count: int, expected: list[int]) -> None:
    """The last update is one of them; where memory is not free yet, a later one takes the turn."""
    groups, each = fp32(30), 2 * PAGES * 8
    placed = with_deferred_flushes(groups, [ON_PATH] * 30, range(30), {"nvme": count * each})
    assert deferred_ids(placed) == expected
    back = with_deferred_flushes(groups, [ON_PATH] * 30, range(30)[::-1], {"nvme": count * each + each // 2})
    assert sorted(29 - i for i in deferred_ids(back))[-1:] == expected[-1:]
    assert len(deferred_ids(back)) == count


def test_each_path_gets_what_it_can_write() -> None:
    groups, each = fp32(30), 2 * PAGES * 8
    placements = [ON_PATH, replace(ON_PATH, before="pfs", after="pfs")] * 15
    placed = with_deferred_flushes(groups, placements, range(30), {"nvme": 2 * each, "pfs": 2 * each})
    deferred = deferred_ids(placed)
    assert [i for i in deferred if i % 2 == 0] == [14, 28]
    assert [i for i in deferred if i % 2] == [13, 29]
    slots = dict(zip(deferred, gradient_memory(groups, placed, range(30)).slots, strict=True))
    for i, slot in slots.items():  # the updates of another path may be far behind
        assert {covered % 2 for covered in slot.covers} == {i % 2}


def test_a_plan_without_room_for_deferred_states_is_refused() -> None:
    placements = [ON_PATH, ON_PATH, replace(ON_PATH, deferred=True)]
    with pytest.raises(PlanError, match="have room for 0: set deferred=False"):
        make_plan(fp32(3), placements, num_slots=1, host_slots={"nvme": 1}, norms="gradient")


def test_no_more_are_deferred_than_used_gradients_have_room_for() -> None:
    """Each state takes two gradients, the weights take two more, and a gradient is used UPDATES_AHEAD before."""
    placed = with_deferred_flushes(fp32(50), [ON_PATH] * 50, range(50), {"nvme": 10**12})
    count = len(deferred_ids(placed))
    memory = gradient_memory(fp32(50), placed, range(50))
    place = {i: place for place, (i, _) in enumerate(memory.sizes)}
    ahead = [place[i] - place[s.covers[-1]] for i, s in zip(deferred_ids(placed), memory.slots, strict=True)]
    assert count == len(memory.slots) == 22
    assert min(ahead) >= UPDATES_AHEAD
    assert with_deferred_flushes(fp32(6), [ON_PATH] * 6, range(6), {"nvme": 10**12}) == (ON_PATH,) * 6


@pytest.mark.parametrize(
    "placement",
    [
        CACHED,
        STAGED,
        replace(ON_PATH, after="host"),
        replace(ON_PATH, before="host"),
        replace(ON_PATH, grad_in_slot=True),
    ],
)
def test_only_state_that_stays_on_paths_is_deferred(placement: Placement) -> None:
    placements = [ON_PATH] * 12 + [placement]
    placed = with_deferred_flushes(fp32(13), placements, range(13), {"nvme": 10**12})
    assert deferred_ids(placed)
    assert not placed[12].deferred


@pytest.mark.parametrize(
    ("changes", "options", "rule"),
    [
        ({}, {"norms": "step"}, "placement"),
        ({}, {"policy": "sequential"}, "policy"),
        ({"mirror_valid": True}, {}, "placement"),
        ({"after": "host"}, {}, "placement"),
    ],
)
def test_plans_that_could_not_defer_are_refused(changes: dict[str, Any], options: dict[str, Any], rule: str) -> None:
    placements = [*[ON_PATH] * 8, replace(ON_PATH, deferred=True, **changes)]
    with pytest.raises(PlanError) as caught:
        make_plan(fp32(9), placements, num_slots=1, host_slots={"nvme": 1}, **{"norms": "gradient", **options})
    assert caught.value.rule == rule


def deferring_plan(count: int = 30) -> Plan:
    placed = with_deferred_flushes(fp32(count), [ON_PATH] * count, range(count), {"nvme": 10**12})
    return make_plan(fp32(count), placed, num_slots=1, host_slots={"nvme": 3}, norms="gradient")


def test_deferred_flushes_come_last_and_the_step_does_not_wait_for_them() -> None:
    plan = deferring_plan()
    writes = [op.is_deferred for op in plan.lanes["nvme:write"]]
    assert writes == sorted(writes)
    assert any(writes)
    assert plan.deferred_flushes == {op.id for op in plan.ops if op.is_deferred}
    assert {plan.by_id[last].lane for last in plan.last_in_step} == {op.lane for op in plan.ops} - {"d2h"}
    assert not plan.deferred_flushes & set(plan.last_in_step)


def test_the_simulated_step_ends_before_them() -> None:
    plan = deferring_plan()
    card = RateCard(
        h2d_bytes_per_second=1e10, d2h_bytes_per_second=1e10, cpu_params_per_second=1e9, device_params_per_second=1e10,
        norm_params_per_second=1e10, paths={"nvme": PathRates(read_bytes_per_second=1e9, write_bytes_per_second=1e9)},
    )  # fmt: skip
    timeline = simulate(plan, card, step_at=0.01)
    ends = {span.op: span.end for span in timeline.spans}
    update = timeline.phases[-1]
    assert update.end == max(end for op, end in ends.items() if op not in plan.deferred_flushes)
    assert update.end < max(ends.values())
    assert update_seconds(plan, card, step_at=0.01) == pytest.approx(update.end - update.start)


@pytest.mark.parametrize(
    ("read", "write", "shares_time", "gain"),
    [(3e9, 2e9, False, 1.04), (6e9, 3e9, False, 1.04), (3e9, 3e9, False, 0.999), (2.4e9, 5e9, True, 0.999)],
)
def test_flushes_that_are_spread_are_at_least_as_good_as_the_last_ones(
    read: float, write: float, shares_time: bool, gain: float
) -> None:
    """Where writes are slower than reads, and do not slow them down, they are better."""
    groups = [Subgroup(i, 2 << 20, 4, 4, 8) for i in range(50)]
    speeds = {"nvme": PathSpeeds(read_bytes_per_second=read, write_bytes_per_second=write)}
    spread = with_deferred_flushes(groups, [ON_PATH] * 50, range(50), deferrable_bytes(speeds, 0.06))
    count = len(deferred_ids(spread))
    card = RateCard(
        h2d_bytes_per_second=1e10, d2h_bytes_per_second=1e10, cpu_params_per_second=1e9, device_params_per_second=1e10,
        norm_params_per_second=1e10,
        paths={"nvme": PathRates(read_bytes_per_second=read, write_bytes_per_second=write)},
        keeps={"nvme:read": {"nvme:write": 0.7}, "nvme:write": {"nvme:read": 0.3}} if shares_time else {},
    )  # fmt: skip

    def seconds(placements: tuple[Placement, ...]) -> float:
        plan = make_plan(
            groups, placements, num_slots=1, host_slots={"nvme": 3}, norms="gradient", rates=PathOpTimes(speeds),
            step_at=0.16,
        )  # fmt: skip
        return update_seconds(plan, card, step_at=0.16)

    last = tuple(replace(ON_PATH, deferred=i >= 50 - count) for i in range(50))
    assert count > 5
    assert seconds(last) / seconds(spread) > gain


def test_a_path_writes_what_its_speed_allows() -> None:
    speeds = {"nvme": PathSpeeds(read_bytes_per_second=3e9, write_bytes_per_second=2e9)}
    assert deferrable_bytes(speeds, 0.25) == {"nvme": 500_000_000}


def test_without_deferred_subgroups_gradients_lie_in_the_order_of_updates() -> None:
    memory = gradient_memory(fp32(3), [CACHED, ON_PATH, ON_PATH], range(3))
    assert memory == GradientMemory(((1, 2 * PAGE_BYTES), (2, 2 * PAGE_BYTES), (0, 2 * PAGE_BYTES)))
    assert memory.offsets == {1: 0, 2: 2 * PAGE_BYTES, 0: 4 * PAGE_BYTES}
    assert memory.nbytes == 6 * PAGE_BYTES
