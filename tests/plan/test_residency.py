"""The residency planner: pure, whatever it starts from; the engine's steps end in the steady state of the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tidegate.errors import CapacityError
from tidegate.plan import Subgroup, make_plan, verify
from tidegate.plan.effective_knobs import EffectiveKnobs, Split
from tidegate.plan.ops import Residence, is_path
from tidegate.plan.residency import (
    GradientBudget,
    TierState,
    next_residences,
    placement,
    spilled_gradients,
    step_order,
)
from tidegate.plan.slot_sizes import whole_pages
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.steady_state import Rank, steady_steps
from tidegate.speeds.rate_card import RateCard

SPEEDS = {
    "nvme": PathSpeeds(read_bytes_per_second=6e9, write_bytes_per_second=3e9),
    "pfs": PathSpeeds(read_bytes_per_second=1e9, write_bytes_per_second=2e9),
}
CARD = RateCard().with_paths(SPEEDS)
SPLITS: list[Split] = [None, "eq1", (("nvme", 2.0), ("pfs", 1.0)), (("pfs", 1.0),)]


def subgroups(count: int, numel: int = 1000) -> list[Subgroup]:
    return [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


@st.composite
def knobs(draw: Any) -> EffectiveKnobs:
    return EffectiveKnobs(
        stride=draw(st.sampled_from(["off", 1.0, 2.0, 3.5])),
        static_ratio=draw(st.sampled_from([0.0, 0.25, 1.0])),
        tier_split=draw(st.sampled_from(SPLITS)),
        host_cache_bytes=draw(st.sampled_from([0, 10_000, 45_000, 10**9])),
        alternate=draw(st.booleans()),
    )


def turns(
    of: list[Subgroup], effective: EffectiveKnobs, tier: TierState, steps: int
) -> list[tuple[tuple[Residence, ...], TierState]]:
    """The residences after each of so many steps, each planned from what the one before left."""
    found = []
    for step in range(steps):
        decided = next_residences(of, effective, tier, step_order(effective, step))
        assert decided.tier is not None
        tier = replace(decided.tier, in_memory={i for i, lives in enumerate(decided.after) if lives == "host"})
        found.append((decided.after, tier))
    return found


@given(count=st.integers(1, 14), first=knobs(), then=knobs())
@settings(max_examples=examples(200))
def test_steps_after_any_knobs_end_in_the_steady_state_of_the_model(
    count: int, first: EffectiveKnobs, then: EffectiveKnobs
) -> None:
    """The engine starts from what it has, the model from nothing: each path has as many subgroups, and host and device
    have the same ones."""
    of = subgroups(count)
    *_, (_, tier) = turns(of, first, TierState(speeds=SPEEDS), 3)
    went = turns(of, then, tier, 4)
    model = [step.placements for step in steady_steps(Rank(of, 2, dict.fromkeys(SPEEDS, 3)), then, CARD)]
    for turn, placements in enumerate(model):
        engine = went[2 + turn][0]
        assert [is_path(p.after) or p.after for p in placements] == [is_path(lives) or lives for lives in engine]
    [(_, alone)] = turns(of, then, TierState(speeds=SPEEDS), 1)
    assert went[-1][1].counts == alone.counts
    assert went[2][0] == went[0][0], "what repeats moves nothing"


@given(count=st.integers(1, 14), effective=knobs(), most=st.tuples(st.integers(0, 14), st.integers(0, 14)))
@settings(max_examples=examples(200))
def test_no_path_gets_more_than_it_can_hold(count: int, effective: EffectiveKnobs, most: tuple[int, int]) -> None:
    capacity = dict(zip(SPEEDS, most, strict=True))
    tier = TierState(speeds=SPEEDS, capacity=capacity)
    try:
        [(after, _)] = turns(subgroups(count), effective, tier, 1)
    except CapacityError:
        named = dict(effective.tier_split) if isinstance(effective.tier_split, tuple) else SPEEDS
        assert sum(capacity[path] for path in named) < count
        return
    assert all(after.count(path) <= n for path, n in capacity.items())


def test_what_a_retired_path_leaves_goes_to_the_others_and_then_to_host_memory() -> None:
    of, off = subgroups(9), EffectiveKnobs("off", 0.0)
    [(_, before)] = turns(of, off, TierState(speeds=SPEEDS), 1)
    failed = replace(before, retired=["nvme"], capacity={"nvme": 0, "pfs": 5})
    [(after, tier)] = turns(of, off, failed, 1)
    assert (after.count("pfs"), after.count("host"), tier.counts) == (5, 4, {"nvme": 0, "pfs": 5})
    assert all(after[i] == "pfs" for i, path in before.assigned.items() if path == "pfs"), "these need not move"
    with pytest.raises(CapacityError):
        next_residences(of, off, replace(failed, host_free_bytes=39_999), "ascending")
    held = replace(failed, host_free_bytes=0, in_memory={i for i, lives in enumerate(after) if lives == "host"})
    assert next_residences(of, off, held, "ascending").after == after, "what is in memory already needs no more"
    named = replace(off, tier_split=(("nvme", 1.0),))
    assert turns(of, named, failed, 1)[0][0].count("pfs") == 5, "weights of retired paths only: speeds decide"


def test_measured_speeds_move_subgroups_only_for_a_clear_gain() -> None:
    of, off = subgroups(40), EffectiveKnobs("off", 0.0)
    [(_, tier)] = turns(of, off, TierState(speeds=SPEEDS), 1)

    def counts(factor: float, split: Split = None) -> dict[str, int]:
        faster = replace(SPEEDS["pfs"], read_bytes_per_second=factor * 1e9, write_bytes_per_second=factor * 2e9)
        state = replace(tier, speeds={**SPEEDS, "pfs": faster})
        return dict(turns(of, replace(off, tier_split=split), state, 1)[0][1].counts)

    assert counts(1.0) == counts(1.08) == tier.counts
    assert counts(2.0)["pfs"] > tier.counts["pfs"]


@given(
    count=st.integers(1, 12), stride=st.sampled_from(["off", 1.0, 2.0]), ratio=st.sampled_from([0.0, 0.25, 0.5]),
    room=st.integers(-3, 14), tiered=st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(200))
def test_gradients_are_spilled_when_the_room_is_full_and_never_those_of_residents(
    count: int, stride: Any, ratio: float, room: int, tiered: bool
) -> None:
    """Plans of the model with them are as valid as any, and their bytes go both ways."""
    of = subgroups(count)
    card = CARD.with_rates(dict.fromkeys(("h2d_bytes_per_second", "d2h_bytes_per_second"), 1e9))
    rank = Rank(of, 2, dict.fromkeys(SPEEDS, 3) if tiered else {}, "release")
    effective = EffectiveKnobs(stride, ratio)
    unbounded = steady_steps(rank, effective, card)[0]
    fixed = sum(s.nbytes("weight") for s in of) + unbounded.device_bytes()
    [step] = steady_steps(replace(rank, gradient_budget=GradientBudget(fixed + room * 2000)), effective, card)
    staged = [i for i, p in enumerate(step.placements) if p.is_staged]
    others = sum(p.processor == "device" and not p.is_staged for p in step.placements)
    fits = max(0, room - others)
    assert [i for i in staged if step.placements[i].spilled] == staged[fits:]
    assert all(step.placements[i].spilled is False for i in range(count) if i not in staged)
    verify(step.plan(card))
    more = {lane: step.lane_bytes()[lane] - nbytes for lane, nbytes in unbounded.lane_bytes().items()}
    assert {more["h2d"], more["d2h"]} == {2000 * len(staged[fits:])}
    each = whole_pages(2000) if tiered else 2000
    assert step.host_bytes()["gradient"] - unbounded.host_bytes()["gradient"] == each * len(staged[fits:])


def test_a_limit_of_its_own_counts_where_the_device_has_room() -> None:
    of = subgroups(4)
    budget = GradientBudget(10**9, most_bytes=4000)
    processors, lives = ("device",) * 4, ("host",) * 4
    room = budget.room_bytes(0)
    assert spilled_gradients(of, processors, lives, lives, room) == [False, False, True, True]  # type: ignore[arg-type]
    assert budget.sampled(2.0, 1000) == GradientBudget(500_000_500, 2000)


@pytest.mark.parametrize(("mode", "in_slot"), [("keep", True), ("release", False)])
def test_state_in_a_host_slot_has_no_mirror_and_its_gradient_may_wait_there(mode: Any, in_slot: bool) -> None:
    place = partial(placement, "cpu", "nvme", mirror_valid=True, spilled=False, mode=mode, has_paths=True)
    placed = place("nvme")
    assert (placed.mirror_valid, placed.grad_in_slot, placed.leaves_mirror) == (False, in_slot, False)
    cached = place("host")
    assert (cached.mirror_valid, cached.grad_in_slot, cached.leaves_mirror) == (False, False, False)
    assert (placed.weight_in_slot, cached.weight_in_slot) == (False, True)
    assert is_path(placed.after)
    make_plan(subgroups(1), [placed], num_slots=1, host_slots={"nvme": 1}, norms="step" if in_slot else "gradient")


def test_without_paths_the_weight_of_an_update_on_the_cpu_has_a_mirror() -> None:
    placed = placement("cpu", "host", "host", mirror_valid=True, spilled=False, mode="keep", has_paths=False)
    assert (placed.mirror_valid, placed.leaves_mirror, placed.weight_in_slot) == (True, True, False)
