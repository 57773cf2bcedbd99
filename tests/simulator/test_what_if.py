"""What an update would take and use under other knobs, with and without storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import EQ1, Off
from tidegate.plan import Subgroup, make_plan, place_subgroups, steady_placements, verify
from tidegate.plan.effective_knobs import EffectiveKnobs, Split
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX
from tidegate.plan.ops import OpKind
from tidegate.plan.slot_sizes import WEIGHT_SLOTS, whole_pages
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.lower_bound import lower_bound
from tidegate.simulator.steady_state import Rank, sampled, steady_steps
from tidegate.simulator.what_if import Prediction, predicted_seconds, what_if
from tidegate.speeds.rate_card import RateCard

H100 = RateCard(
    h2d_bytes_per_second=52e9,
    d2h_bytes_per_second=52e9,
    cpu_params_per_second=2e9,
    device_params_per_second=25e9,
    norm_params_per_second=500e9,
)
"""One GPU of the paper's H100 node (DOS section 5.1 and Table 1)."""
NVME = PathSpeeds(read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9)
PFS = PathSpeeds(read_bytes_per_second=3.6e9, write_bytes_per_second=3.6e9, factors=DUPLEX)
STORED = H100.with_paths({"nvme": NVME, "pfs": PFS})
SLOTS = {"nvme": 3, "pfs": 3}


def subgroups(count: int, numel: int = 100_000_000) -> list[Subgroup]:
    return [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


def predict(count: int, stride: float | Off, static_ratio: float = 0.0, rates: RateCard = H100) -> Prediction:
    return what_if(Rank(subgroups(count), 2), EffectiveKnobs(stride, static_ratio), rates)


def stored(count: int, effective: EffectiveKnobs, rates: RateCard = STORED) -> Prediction:
    return what_if(Rank(subgroups(count), 2, SLOTS), effective, rates)


def test_all_on_the_cpu_takes_what_the_cpu_takes() -> None:
    found = predict(10, "off")
    cpu, last_weight = 1e9 / 2e9, 2e8 / 52e9
    assert found.update_seconds == pytest.approx(cpu + last_weight), "squares are summed in the backward"
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
    placements = steady_placements(place_subgroups(12, stride=stride, static_ratio=ratio))
    plan = make_plan(subgroups(12), placements, num_slots=2)
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


def test_what_a_step_costs_beside_its_ops_comes_once_and_is_nobodys_fault() -> None:
    slow = replace(H100, step_seconds=0.5)
    for count in (4, 1200):
        found, without = predict(count, 2, rates=slow), predict(count, 2)
        assert found.update_seconds == pytest.approx(without.update_seconds + 0.5)
        assert found.stalls["dispatch"] == pytest.approx(without.stalls.get("dispatch", 0.0) + 0.5)
        rank = Rank(subgroups(count), 2)
        assert predicted_seconds(rank, EffectiveKnobs(2, 0.0), slow) == pytest.approx(found.update_seconds)


def test_nothing_to_predict() -> None:
    with pytest.raises(ConfigError):
        predict(0, 2)


def test_a_card_with_a_hole_is_refused_where_it_matters() -> None:
    with pytest.raises(ConfigError, match="cpu_params_per_second"):
        predict(4, "off", rates=replace(H100, cpu_params_per_second=None))


# ---- storage


def test_one_path_alone_takes_what_it_takes_to_read_and_write_everything() -> None:
    """One disk, nothing else of any weight: all but the first three fetches and all flushes, one after the other."""
    rates = replace(H100, cpu_params_per_second=1e15, h2d_bytes_per_second=1e15, d2h_bytes_per_second=1e15)
    rates = replace(rates, norm_params_per_second=1e18).with_paths({"nvme": NVME})
    found = what_if(Rank(subgroups(20), 2, {"nvme": 3}), EffectiveKnobs("off", 0.0), rates)
    expected = 17 * 1e9 / 6.9e9 + 20 * 1e9 / 5.3e9
    assert found.update_seconds == pytest.approx(expected, rel=1e-4)
    assert found.lower_bound.resource == "nvme"
    assert found.lower_bound.seconds == pytest.approx(expected, rel=1e-4)
    assert sum(found.stalls.values()) == pytest.approx(expected, rel=1e-3)
    assert set(found.stalls) == {"nvme:read", "nvme:write"}


def test_reads_and_writes_of_a_duplex_path_overlap() -> None:
    rates = replace(H100, cpu_params_per_second=1e15, h2d_bytes_per_second=1e15, d2h_bytes_per_second=1e15)
    speeds = PathSpeeds(read_bytes_per_second=4e9, write_bytes_per_second=4e9, factors=DUPLEX)
    rank = Rank(subgroups(40), 2, {"pfs": 3})
    both = what_if(rank, EffectiveKnobs("off", 0.0), rates.with_paths({"pfs": speeds})).update_seconds
    one = what_if(
        rank, EffectiveKnobs("off", 0.0), rates.with_paths({"pfs": replace(speeds, factors=HALF_DUPLEX)})
    ).update_seconds
    assert both == pytest.approx(40 * 1e9 / 4e9, rel=0.05)
    assert one == pytest.approx(77 * 1e9 / 4e9, rel=0.05)


def test_a_larger_host_cache_takes_from_the_update_what_it_takes_from_the_paths() -> None:
    none, half, whole = (stored(40, EffectiveKnobs("off", 0.0, None, n * 1_000_000_000)) for n in (0, 20, 40))
    assert none.update_seconds > half.update_seconds > whole.update_seconds
    assert whole.link_bytes["nvme:read"] == whole.link_bytes["pfs:write"] == 0
    assert half.link_bytes["nvme:read"] + half.link_bytes["pfs:read"] == 20_000_000_000
    assert (none.host_bytes["state"], half.host_bytes["state"]) == (0, 20 * -(-(10**9) // 4096) * 4096)
    without = predict(40, "off")
    assert {kind: whole.host_bytes[kind] for kind in ("state", "gradient")} == {
        kind: without.host_bytes[kind] for kind in ("state", "gradient")
    }
    assert whole.host_bytes["mirror"] == 0, "the weight of an update on the CPU is in a slot"
    weight = whole_pages(subgroups(40)[0].nbytes("weight"))
    assert whole.host_bytes["slot"] == WEIGHT_SLOTS * weight, "with everything in memory there are no slots for state"
    assert whole.update_seconds == pytest.approx(without.update_seconds, rel=0.01)


def test_a_split_that_ignores_speeds_costs_what_its_slowest_path_takes() -> None:
    auto, eq1, nvme, pfs = (
        stored(40, EffectiveKnobs("off", 0.0, split)) for split in (None, EQ1, (("nvme", 1.0),), (("pfs", 1.0),))
    )
    assert auto.update_seconds <= eq1.update_seconds < nvme.update_seconds
    assert auto.update_seconds < pfs.update_seconds
    assert nvme.link_bytes["pfs:read"] == 0
    # MLP Eq. 1: shares of min(read, write), 5.3 to 3.6.
    assert (eq1.link_bytes["nvme:read"], eq1.link_bytes["pfs:read"]) == (24_000_000_000, 16_000_000_000)


def test_alternation_saves_the_transfers_of_half_the_cache() -> None:
    """Both steps keep n / 2 in host memory (the old ones are there until the new ones come), whichever end they are."""
    pinned, alternate = (stored(40, EffectiveKnobs("off", 0.0, None, 20 * 10**9, turn)) for turn in (False, True))
    moved = [sum(n for lane, n in found.link_bytes.items() if lane.endswith(":read")) for found in (pinned, alternate)]
    assert moved == [20_000_000_000, 30_000_000_000]
    assert alternate.host_bytes["state"] == pinned.host_bytes["state"]
    assert alternate.update_seconds > pinned.update_seconds


def test_a_path_without_speeds_is_named() -> None:
    with pytest.raises(ConfigError, match="path pfs"):
        stored(4, EffectiveKnobs("off", 0.0), H100.with_paths({"nvme": NVME}))


def test_many_tiered_subgroups_are_scaled_with_their_cache() -> None:
    few, many = (stored(n, EffectiveKnobs(3.0, 0.0, None, n * 10**9 // 4)) for n in (96, 960))
    assert many.update_seconds == pytest.approx(10 * few.update_seconds, rel=0.02)
    assert many.link_bytes["nvme:read"] == pytest.approx(10 * few.link_bytes["nvme:read"], rel=0.02)
    assert many.lower_bound.seconds == pytest.approx(10 * few.lower_bound.seconds, rel=0.02)


def test_what_fits_on_a_path_fits_in_the_sample_too() -> None:
    """Capacities are counted in whole subgroups: rounded down, a path would seem to be too small for the last ones."""
    exact = Rank(subgroups(100, 1000), 2, SLOTS, capacity={"nvme": 50, "pfs": 50})
    few, _, _ = sampled(exact, EffectiveKnobs("off", 0.0, (("nvme", 1.0), ("pfs", 1.0))))
    assert len(few.subgroups) == 96
    assert few.capacity == {"nvme": 48, "pfs": 48}
    uneven = replace(exact, capacity={"nvme": 51, "pfs": 49, "gone": 0})
    few, _, _ = sampled(uneven, EffectiveKnobs("off", 0.0))
    assert few.capacity == {"nvme": 49, "pfs": 48, "gone": 0}


effectives = st.builds(
    EffectiveKnobs,
    st.sampled_from(["off", 1.0, 2.0, 3.5]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([None, EQ1, (("nvme", 2.0), ("pfs", 1.0)), (("pfs", 1.0),)]),
    st.integers(0, 25_000_000),
    st.booleans(),
)


def test_plans_count_on_the_backward_and_on_the_order_of_gradients_as_the_engines_do() -> None:
    """Fetches that are done before `step()` are updated first, so that their path has something to write."""
    rank, effective = Rank(subgroups(8), 2, {"nvme": 3}), EffectiveKnobs("off", 0.0, host_cache_bytes=4_000_000_000)
    [step] = steady_steps(rank, effective, STORED)
    sooner, later = step.plan(STORED), step.plan(STORED, 4.0)
    first = [next(op for op in plan.ops if op.kind is OpKind.CPU_UPDATE).subgroup for plan in (sooner, later)]
    stored_ = [i for i, placement in enumerate(step.placements) if placement.before == "nvme"]
    assert (first[0] in stored_, first[1] in stored_) == (False, True)
    engine = replace(rank, step_at=4.0, gradient_order=[*range(8)])
    [told] = steady_steps(engine, effective, STORED)
    plan = told.plan(STORED)
    assert [op.subgroup for op in plan.of_kind(OpKind.CPU_UPDATE)] == [
        op.subgroup for op in later.of_kind(OpKind.CPU_UPDATE)
    ]
    copied = [op.subgroup for op in plan.of_kind(OpKind.GRAD_D2H)]
    assert copied == sorted(copied)
    assert [op.subgroup for op in later.of_kind(OpKind.GRAD_D2H)] != copied


def test_ops_are_ordered_by_the_speeds_that_the_engine_knows_not_by_those_it_is_predicted_with() -> None:
    """The engine takes its path to be too slow for fetches in the backward, and updates what needs no path first."""
    rank, effective = Rank(subgroups(8), 2, {"nvme": 3}), EffectiveKnobs("off", 0.0, host_cache_bytes=6_000_000_000)
    slow = {"nvme": PathSpeeds(read_bytes_per_second=1e8, write_bytes_per_second=5.3e9)}

    def first(rank: Rank) -> bool:
        [step] = steady_steps(rank, effective, STORED)
        updated = next(op for op in step.plan(STORED, 4.0).ops if op.kind is OpKind.CPU_UPDATE)
        return step.placements[updated.subgroup].before == "nvme"

    assert first(rank)
    assert not first(replace(rank, path_speeds=slow))


def test_a_sample_has_the_order_of_gradients_of_those_in_it() -> None:
    many = Rank(subgroups(500, 1000), 2, gradient_order=[*range(500)], step_at=1.0)
    few, _, scale = sampled(many, EffectiveKnobs("off", 0.0))
    assert few.gradient_order == [*range(len(few.subgroups))]
    assert few.step_at == 0.5
    assert 1 < scale < 2


@settings(max_examples=examples(60))
@given(
    effective=effectives,
    sizes=st.lists(st.integers(1, 1_000_000), min_size=1, max_size=16),
    gradients=st.sampled_from(["keep", "release"]),
    backward=st.sampled_from([None, 0.0, 1e-3]),
)
def test_what_holds_of_every_prediction(
    effective: EffectiveKnobs, sizes: list[int], gradients: Literal["keep", "release"], backward: float | None
) -> None:
    """Its plans are valid, bytes are those of its plans, nothing is faster than the bound, stalls are part of it."""
    groups = [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i, numel in enumerate(sizes)]
    rank = Rank(groups, 2, {"nvme": 2, "pfs": 1}, gradients)
    steps = steady_steps(rank, effective, STORED)
    plans = [step.plan(STORED) for step in steps]
    for plan in plans:
        verify(plan)
    found = what_if(rank, effective, STORED, backward_seconds=backward)
    for lane, nbytes in found.link_bytes.items():
        assert nbytes == sum(plan.link_bytes(lane) for plan in plans) // len(plans)
    for step in steps:
        assert found.lower_bound.seconds <= lower_bound(step, STORED).seconds
    assert found.update_seconds >= found.lower_bound.seconds * (1 - 1e-9)
    assert sum(found.stalls.values()) <= found.update_seconds * (1 + 1e-9)
    assert found.update_seconds == pytest.approx(
        predicted_seconds(rank, effective, STORED, backward_seconds=backward), rel=1e-9
    )


def test_a_path_that_is_hardly_worth_it_keeps_one_subgroup_as_in_the_engine() -> None:
    slow = PathSpeeds(read_bytes_per_second=1e6, write_bytes_per_second=1e6)
    rates = H100.with_paths({"nvme": NVME, "pfs": slow})
    assert stored(12, EffectiveKnobs("off", 0.0), rates).link_bytes["pfs:read"] == 1_000_000_000


@pytest.mark.parametrize("split", [None, EQ1, (("nvme", 2.0), ("pfs", 1.0)), (("pfs", 1.0),)])
@pytest.mark.parametrize("count", [40, 960])
def test_a_retired_path_gets_nothing_and_a_small_one_what_it_holds(split: Split, count: int) -> None:
    def stored_on(capacity: dict[str, int]) -> list[int]:
        retired = [path for path, most in capacity.items() if not most]
        rank = Rank(subgroups(count), 2, SLOTS, capacity=capacity, retired=retired)
        found = what_if(rank, EffectiveKnobs("off", 0.0, split), STORED)
        return [round(found.link_bytes[f"{path}:read"] / 10**9) for path in SLOTS] + [
            round(found.host_bytes["state"] / 10**9)
        ]

    assert stored_on({"nvme": count, "pfs": 0}) == [count, 0, 0]
    if split != (("pfs", 1.0),):
        assert stored_on({"pfs": count // 10}) == [count - count // 10, count // 10, 0]
    # What no path is left for stays in host memory, as in the engine.
    assert stored_on({"nvme": count // 4, "pfs": 0}) == [count // 4, 0, count - count // 4]
