"""What the model would choose: the best of all candidates, though most are never simulated."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Off, device_share
from tidegate.plan import Subgroup
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.predictor import Predictor
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import predicted_seconds
from tidegate.speeds.rate_card import RateCard
from tidegate.tuner.search import _ROUNDING, CANDIDATE_STRIDES, _bound_seconds, best, candidates

H100 = RateCard(
    h2d_bytes_per_second=52e9,
    d2h_bytes_per_second=52e9,
    cpu_params_per_second=2e9,
    device_params_per_second=25e9,
    norm_params_per_second=500e9,
)
SLOTS = {"nvme": 3, "pfs": 3}
NVME = PathSpeeds(read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9)


def subgroups(count: int, numel: int = 100_000_000) -> list[Subgroup]:
    return [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


def best_of(
    rank: Rank, now: EffectiveKnobs, rates: RateCard, free: Collection[str], *,
    backward_seconds: float | None = None, **options: Any,
) -> tuple[EffectiveKnobs, float] | None:  # fmt: skip
    return best(Predictor(rank=rank, rates=rates, backward_seconds=backward_seconds), now, free, **options)


def stride_of(rank: Rank, static_ratio: float, rates: RateCard) -> float | Off:
    found = best_of(rank, EffectiveKnobs("off", static_ratio), rates, {"stride"})
    assert found is not None
    return found[0].stride


@pytest.mark.parametrize(
    ("rates", "ratio", "num_slots", "low", "high"),
    [
        (H100, 0.0, 2, 1.0, 2.0),
        (replace(H100, h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9), 0.0, 2, 6.0, math.inf),
        (H100, 1.0, 2, math.inf, math.inf),  # nothing left to stage: ask nothing of the device
        (H100, 0.0, 0, math.inf, math.inf),  # no slot
    ],
)
def test_the_stride(rates: RateCard, ratio: float, num_slots: int, low: float, high: float) -> None:
    stride = stride_of(Rank(subgroups(40), num_slots), ratio, rates)
    assert low <= (math.inf if stride == "off" else stride) <= high


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
paths = st.builds(
    PathSpeeds,
    read_bytes_per_second=speeds,
    write_bytes_per_second=speeds,
    factors=st.sampled_from([HALF_DUPLEX, DUPLEX, (0.6, 0.8), (0.4, 0.3)]),
)


@settings(max_examples=examples(50))
@given(
    rates=cards,
    nvme=paths,
    pfs=paths,
    sizes=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=12),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    num_slots=st.integers(1, 4),
    stride=st.sampled_from(["off", *CANDIDATE_STRIDES]),
    tiered=st.booleans(),
    backward=st.sampled_from([None, 0.0, 0.01]),
)
def test_what_is_not_simulated_could_not_have_been_better(
    rates: RateCard,
    nvme: PathSpeeds,
    pfs: PathSpeeds,
    sizes: list[int],
    ratio: float,
    num_slots: int,
    stride: float | Off,
    tiered: bool,
    backward: float | None,
) -> None:
    """The choice is that of simulating every candidate, and a floor is one."""
    groups = [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i, numel in enumerate(sizes)]
    rank = Rank(groups, num_slots, SLOTS if tiered else {})
    rates = rates.with_paths({"nvme": nvme, "pfs": pfs}) if tiered else rates
    now = EffectiveKnobs(stride, ratio, (("nvme", 1.0),), sum(sizes) * 3)
    free = {"stride", "order", "tier_split"}
    all_of_them = list(candidates(rank, now, rates, free, 0))
    seconds = {one: predicted_seconds(rank, one, rates, backward_seconds=backward) for one in all_of_them}
    for one, found in seconds.items():
        assert _bound_seconds(rank, one, rates) <= found * _ROUNDING
    choice = best_of(rank, now, rates, free, backward_seconds=backward)
    assert choice is not None
    score = min((float(f"{seconds[one]:.9g}"), device_share(one.stride)) for one in all_of_them)
    assert (choice[1], device_share(choice[0].stride)) == score
    assert choice[1] == float(f"{seconds[choice[0]]:.9g}")
    assert best_of(rank, now, rates, free, backward_seconds=backward, below_seconds=choice[1] * 0.999) is None


def test_what_is_pinned_stays_and_what_does_not_fit_is_not_chosen() -> None:
    rank = Rank(subgroups(40), 2, {"nvme": 3})
    rates = H100.with_paths({"nvme": NVME})
    now = EffectiveKnobs("off", 0.1, (("nvme", 1.0),), 0, True)
    free = best_of(rank, now, rates, {"stride", "order", "host_cache"}, cache_bytes=20 * 10**9)
    assert free is not None
    assert (free[0].alternate, free[0].host_cache_bytes, free[0].tier_split) == (False, 20 * 10**9, now.tier_split)
    pinned = best_of(rank, now, rates, {"stride"})
    assert pinned is not None
    assert (pinned[0].alternate, pinned[0].host_cache_bytes) == (True, 0)
    assert best_of(rank, now, rates, {"stride", "order"}, allowed=lambda one: one == now) == (
        now,
        float(f"{predicted_seconds(rank, now, rates):.9g}"),
    )
    assert best_of(rank, now, rates, {"stride"}, allowed=lambda _: False) is None


def test_storage_changes_the_stride() -> None:
    """A slow disk decides the update: the device can take nothing off it, so nothing is asked of the device."""
    slow = PathSpeeds(read_bytes_per_second=0.2e9, write_bytes_per_second=0.2e9)
    assert stride_of(Rank(subgroups(40), 2), 0.0, H100) != "off"
    found = best_of(
        Rank(subgroups(40), 2, {"disk": 3}), EffectiveKnobs(2.0, 0.0), H100.with_paths({"disk": slow}), {"stride"},
        below_seconds=0.95 * predicted_seconds(
            Rank(subgroups(40), 2, {"disk": 3}), EffectiveKnobs(2.0, 0.0), H100.with_paths({"disk": slow})
        ),
    )  # fmt: skip
    assert found is None, "no move promises 5 %"


def test_a_candidate_that_needs_a_rate_nobody_has_seen_is_left_out() -> None:
    """A run whose stride was pinned to `off` knows nothing of the device: what can be told of the rest is told."""
    unseen = RateCard(
        d2h_bytes_per_second=52e9, h2d_bytes_per_second=52e9, cpu_params_per_second=2e9, norm_params_per_second=500e9
    )
    found = best_of(Rank(subgroups(40), 2), EffectiveKnobs("off", 0.0), unseen, {"stride"})
    assert found is not None
    assert found[0].stride == "off"
    with pytest.raises(ConfigError, match=r"device_params_per_second.*not measured yet"):
        best_of(Rank(subgroups(40), 2), EffectiveKnobs(2.0, 0.0), unseen, set())


@pytest.mark.parametrize("unseen", ["d2h_bytes_per_second", "norm_params_per_second"])
def test_with_no_candidate_left_it_says_which_rate_is_missing(unseen: str) -> None:
    """Also one that only ops before the norm need, which floors leave out."""
    with pytest.raises(ConfigError, match=f"{unseen}.*not measured yet"):
        best_of(Rank(subgroups(40), 2), EffectiveKnobs("off", 0.0), replace(H100, **{unseen: None}), {"stride"})


def test_3000_subgroups_take_seconds_at_most() -> None:
    start = time.process_time()
    best_of(Rank(subgroups(3000), 2), EffectiveKnobs("off", 0.0), H100, {"stride"})
    assert time.process_time() - start < 5.0


def test_nothing_to_choose_for() -> None:
    with pytest.raises(ConfigError):
        best_of(Rank([], 2), EffectiveKnobs("off", 0.0), H100, {"stride"})
