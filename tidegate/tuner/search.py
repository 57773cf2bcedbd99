"""Which knobs the model would choose: enumerated, the hopeless ones left out, the others scored by the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from tidegate.errors import ConfigError
from tidegate.knobs.knobs import OFF, Off, device_share, spec
from tidegate.plan.effective_knobs import Effective
from tidegate.plan.ops import Subgroup
from tidegate.simulator.lower_bound import bound
from tidegate.simulator.paper_equations import cpu_to_device_ratio, stride_from_ratio
from tidegate.simulator.steady_state import Rank, sampled, settled
from tidegate.simulator.what_if import predicted_seconds
from tidegate.speeds.rate_card import RateCard

START_STRIDE: Final = 2.0
"""What `auto` begins with, before rates are measured: the papers' choice."""
CANDIDATE_STRIDES: Final[tuple[float, ...]] = (
    1, 1.125, 1.25, 1.375, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 12, 16,
)  # fmt: skip
"""Device shares that differ by 0.13 at most, by 0.06 around 1/2: half a stride there may be 13 % of an update."""
CANDIDATE_RATIOS: Final[tuple[float, ...]] = (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)
"""Of residents, for those who may choose them: an eighth of the subgroups more or fewer."""
_ROUNDING: Final = 1 + 1e-6
"""Sums of the same durations in another order differ by less."""


def best(
    rank: Rank,
    now: Effective,
    rates: RateCard,
    free: Collection[str],
    *,
    cache_bytes: int = 0,
    below_seconds: float = math.inf,
    backward_seconds: float | None = None,
    static_ratios: Sequence[float] = (),
    allowed: Callable[[Effective], bool] = lambda _: True,
) -> tuple[Effective, float] | None:
    """The best knobs, and their update in seconds; None when nothing takes less than `below_seconds`.

    Knobs in `free` may differ from `now`: `stride` (a fixed list and the stride of DOS Eq. 1, `off` where there is no
    slot), `order`, `tier_split` (what measured speeds call for) and `host_cache`, which may grow to `cache_bytes`: in
    the model more of it is never slower. static_ratios: others than that of `now` to look at. allowed: refuses what
    does not fit; it is asked last. Of equals the one that asks least of the device, in one order. The most promising
    are simulated first, and those that cannot be better than the best so far not at all: a training thread waits for
    this.

    Candidates that need a rate which is not known are left out. ConfigError when that leaves none.
    """
    floors, unknown = _floors(rank, candidates(rank, now, rates, free, cache_bytes, static_ratios), rates)
    simulated = 0
    found: tuple[tuple[float, float, float, bool], Effective] | None = None
    for floor, one in sorted(floors, key=lambda pair: pair[0]):
        if floor > _ROUNDING * min(below_seconds, found[0][0] if found else math.inf):
            break
        try:
            seconds = predicted_seconds(rank, one, rates, backward_seconds=backward_seconds)
        except ConfigError as error:  # a rate of what is done before `step()`, which floors leave out
            unknown = error
            continue
        simulated += 1
        # Nine digits: sums of the same durations in another order are the same time.
        score = (float(f"{seconds:.9g}"), one.static_ratio, device_share(one.stride), one.alternate)
        if seconds < below_seconds and (found is None or score < found[0]) and allowed(one):
            found = score, one
    else:
        if unknown is not None and not simulated:
            raise unknown
    return (found[1], found[0][0]) if found else None


def candidates(
    rank: Rank,
    now: Effective,
    rates: RateCard,
    free: Collection[str],
    cache_bytes: int,
    static_ratios: Sequence[float] = (),
) -> Iterator[Effective]:
    """All settings in which only `free` knobs and the static ratio differ from `now`, `now` among them."""
    strides: Sequence[float | Off] = [now.stride]
    if "stride" in free:
        found = {*CANDIDATE_STRIDES, *equation_stride(rank.subgroups, rates)} if rank.num_slots > 0 else set()
        strides = list(dict.fromkeys([OFF, *sorted(found, reverse=True), now.stride]))
    base = now
    if rank.host_slots and "tier_split" in free:
        base = replace(base, tier_split=None)
    if rank.host_slots and "host_cache" in free:
        base = replace(base, host_cache_bytes=max(cache_bytes, now.host_cache_bytes))
    # Without a cache both orders move the same.
    orders = (False, True) if "order" in free and rank.host_slots and base.host_cache_bytes else (now.alternate,)
    for stride, alternate, ratio in product(strides, orders, dict.fromkeys([now.static_ratio, *static_ratios])):
        yield replace(base, stride=stride, alternate=alternate, static_ratio=ratio)


def equation_stride(subgroups: Sequence[Subgroup], rates: RateCard) -> tuple[float, ...]:
    """The stride of DOS Eq. 1, with B counted in thirds of our state, which need not be three fp32 words."""
    h2d, d2h = rates.h2d_bytes_per_second, rates.d2h_bytes_per_second
    on_cpu, on_device = rates.cpu_params_per_second, rates.device_params_per_second
    state_bytes = sum(s.nbytes("state") for s in subgroups)
    if h2d is None or d2h is None or on_cpu is None or on_device is None or not state_bytes:
        return ()
    word_bytes = state_bytes / sum(s.numel for s in subgroups) / 3
    stride = stride_from_ratio(cpu_to_device_ratio(min(h2d, d2h) / word_bytes, on_cpu, on_device))
    return (stride,) if stride <= spec("stride").maximum else ()


def _floors(
    rank: Rank, choices: Iterable[Effective], rates: RateCard
) -> tuple[list[tuple[float, Effective]], ConfigError | None]:
    """Each with its floor, as far as the rates that it needs are known; and what was said of one that was not."""
    found: list[tuple[float, Effective]] = []
    unknown: ConfigError | None = None
    for one in choices:
        try:
            found.append((_floor_seconds(rank, one, rates), one))
        except ConfigError as error:
            unknown = error
    return found, unknown


def _floor_seconds(rank: Rank, effective: Effective, rates: RateCard) -> float:
    """What no settled update under these knobs takes less than."""
    few, smaller, scale = sampled(rank, effective)
    steps = settled(few, smaller, rates)
    return sum(bound(step, rates).seconds for step in steps) / len(steps) * scale
