"""Knob search: enumerates candidates, prunes them by their lower bound, and simulates the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from tidegate.errors import ConfigError
from tidegate.knobs.knobs import OFF, Off, device_share, spec
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Subgroup
from tidegate.simulator.lower_bound import lower_bound
from tidegate.simulator.paper_equations import cpu_to_device_ratio, stride_from_ratio
from tidegate.simulator.predictor import Predictor
from tidegate.simulator.steady_state import Rank, sampled, steady_steps
from tidegate.speeds.rate_card import RateCard

START_STRIDE: Final = 2.0
"""The stride with which `auto` begins, before rates are measured; it is the choice of the papers."""
CANDIDATE_STRIDES: Final[tuple[float, ...]] = (
    1, 1.125, 1.25, 1.375, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 12, 16,
)  # fmt: skip
"""Strides that the search tries. Their device shares (1 / stride) are at most 0.13 apart, and at most 0.06 around 1/2,
where a change of the stride by 0.5 can change the update time by 13 %."""
CANDIDATE_RATIOS: Final[tuple[float, ...]] = (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)
"""Static ratios for callers that may change the residents, in steps of 1/8 of the subgroups."""
_ROUNDING: Final = 1 + 1e-6
"""Tolerance factor for comparing two times: if the same durations are added in another order, the sums differ by less
than this factor."""


def best(
    predictor: Predictor,
    now: EffectiveKnobs,
    free: Collection[str],
    *,
    cache_bytes: int = 0,
    below_seconds: float = math.inf,
    static_ratios: Sequence[float] = (),
    allowed: Callable[[EffectiveKnobs], bool] = lambda _: True,
) -> tuple[EffectiveKnobs, float] | None:
    """The best knobs, and their update time in seconds; None when no candidate takes less than `below_seconds`.

    free: names of the knobs that may differ from `now`. `stride`: a fixed list, `off`, and the stride of DOS Eq. 1;
    only `off` if there are no staging slots. `order`: both orders. `tier_split`: the split by measured speeds.
    `host_cache`: grows to `cache_bytes`, because by the model more cache is never slower. static_ratios: ratios to try
    in addition to the ratio of `now`. allowed: returns whether knobs fit; called last. If two candidates take the same
    time, the one with less use of the device is chosen, then the one with a fixed order of updates.

    Candidates are simulated in the order of their lower bounds. A candidate that cannot be better than the best one so
    far is not simulated, because a training thread waits for the result.

    Candidates that need an unknown rate are left out. ConfigError when no candidate remains.
    """
    rank, rates = predictor.rank, predictor.rates
    bounds, unknown = _lower_bounds(rank, candidates(rank, now, rates, free, cache_bytes, static_ratios), rates)
    simulated = 0
    found: tuple[tuple[float, float, float, bool], EffectiveKnobs] | None = None
    for bound_seconds, knobs in sorted(bounds, key=lambda pair: pair[0]):
        if bound_seconds > _ROUNDING * min(below_seconds, found[0][0] if found else math.inf):
            break
        try:
            seconds = predictor.update_seconds(knobs)
        except ConfigError as error:  # an unknown rate of ops before `step()`, which lower bounds ignore
            unknown = error
            continue
        simulated += 1
        # Rounded to nine digits, so that sums of the same durations in another order are equal.
        score = (float(f"{seconds:.9g}"), knobs.static_ratio, device_share(knobs.stride), knobs.alternate)
        if seconds < below_seconds and (found is None or score < found[0]) and allowed(knobs):
            found = score, knobs
    else:
        if unknown is not None and not simulated:
            raise unknown
    return (found[1], found[0][0]) if found else None


def candidates(
    rank: Rank,
    now: EffectiveKnobs,
    rates: RateCard,
    free: Collection[str],
    cache_bytes: int,
    static_ratios: Sequence[float] = (),
) -> Iterator[EffectiveKnobs]:
    """All candidate knobs: only `free` knobs and the static ratio differ from `now`.

    `tier_split` and `host_cache` are not varied: if free, they are set to their best value by the model.
    """
    strides: Sequence[float | Off] = [now.stride]
    if "stride" in free:
        numbers = {*CANDIDATE_STRIDES, *equation_stride(rank.subgroups, rates)} if rank.num_slots > 0 else set()
        strides = list(dict.fromkeys([OFF, *sorted(numbers, reverse=True), now.stride]))
    base = now
    if rank.host_slots and "tier_split" in free:
        base = replace(base, tier_split=None)
    if rank.host_slots and "host_cache" in free:
        base = replace(base, host_cache_bytes=max(cache_bytes, now.host_cache_bytes))
    # Without a host cache both orders copy the same bytes.
    orders = (False, True) if "order" in free and rank.host_slots and base.host_cache_bytes else (now.alternate,)
    for stride, alternate, ratio in product(strides, orders, dict.fromkeys([now.static_ratio, *static_ratios])):
        yield replace(base, stride=stride, alternate=alternate, static_ratio=ratio)


def equation_stride(subgroups: Sequence[Subgroup], rates: RateCard) -> tuple[float, ...]:
    """The stride of DOS Eq. 1, as a tuple with one element. The tuple is empty when a rate is not known, or when the
    stride is above the maximum of the knob.

    The equation assumes a state of three fp32 words per parameter, and gives the link speed B in such words. Tidegate's
    state can be smaller, so one third of the state of a parameter counts as a word.
    """
    h2d, d2h = rates.h2d_bytes_per_second, rates.d2h_bytes_per_second
    on_cpu, on_device = rates.cpu_params_per_second, rates.device_params_per_second
    state_bytes = sum(s.nbytes("state") for s in subgroups)
    if h2d is None or d2h is None or on_cpu is None or on_device is None or not state_bytes:
        return ()
    word_bytes = state_bytes / sum(s.numel for s in subgroups) / 3
    stride = stride_from_ratio(cpu_to_device_ratio(min(h2d, d2h) / word_bytes, on_cpu, on_device))
    return (stride,) if stride <= spec("stride").maximum else ()


def _lower_bounds(
    rank: Rank, choices: Iterable[EffectiveKnobs], rates: RateCard
) -> tuple[list[tuple[float, EffectiveKnobs]], ConfigError | None]:
    """Computes the lower bound of the update's time for each candidate, in seconds. Candidates that need an unknown
    rate are left out; the second value is the error of the last of them, or None."""
    bounds: list[tuple[float, EffectiveKnobs]] = []
    unknown: ConfigError | None = None
    for knobs in choices:
        try:
            bounds.append((_bound_seconds(rank, knobs, rates), knobs))
        except ConfigError as error:
            unknown = error
    return bounds, unknown


def _bound_seconds(rank: Rank, effective: EffectiveKnobs, rates: RateCard) -> float:
    """The lower bound of the update's time under these knobs in the steady state, in seconds."""
    few, smaller, scale = sampled(rank, effective)
    steps = steady_steps(few, smaller, rates)
    return sum(lower_bound(step, rates).seconds for step in steps) / len(steps) * scale
