"""A look of the tuner: what the model would move to now, and by how much it is better."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tidegate.errors import ConfigError
from tidegate.plan.effective_knobs import Effective
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import predicted_seconds
from tidegate.speeds.rate_card import RateCard
from tidegate.tuner.search import START_STRIDE, best
from tidegate.tuner.tuner import MINIMUM_GAIN, Move


def look(
    rank: Rank,
    now: Effective,
    rates: RateCard,
    free: Collection[str],
    *,
    cache_bytes: int = 0,
    backward_seconds: float | None = None,
    allowed: Callable[[Effective], bool] = lambda _: True,
) -> Move | None:
    """The best knobs by these rates, if they promise MINIMUM_GAIN; arguments as of `best`.

    Where nothing known is better and other strides cannot be judged, because nothing runs on the CPU or nothing on the
    device, the stride with which `auto` begins is a probe: it shows both speeds.
    """
    try:
        present = predicted_seconds(rank, now, rates, backward_seconds=backward_seconds)
        found = best(
            rank, now, rates, free, cache_bytes=cache_bytes, below_seconds=(1 - MINIMUM_GAIN) * present,
            backward_seconds=backward_seconds, allowed=allowed,
        )  # fmt: skip
    except ConfigError:
        return None  # a rate that the present knobs need was not seen yet
    if found is not None:
        return Move(found[0], 1 - found[1] / present)
    if "stride" not in free or rank.num_slots == 0 or _knows_both(rates):
        return None
    probe = replace(now, stride=START_STRIDE)
    unknown = promised(rank, probe, rates, backward_seconds) is None
    return Move(probe, None) if unknown and allowed(probe) else None


def _knows_both(rates: RateCard) -> bool:
    """Whether all is known that any stride needs: to see that takes no plan."""
    both = (rates.cpu_params_per_second, rates.device_params_per_second)
    return None not in (*both, rates.h2d_bytes_per_second, rates.d2h_bytes_per_second)


def promised(rank: Rank, knobs: Effective, rates: RateCard, backward_seconds: float | None) -> float | None:
    """Seconds of the update under these knobs; None while a rate is not known that they need."""
    try:
        return predicted_seconds(rank, knobs, rates, backward_seconds=backward_seconds)
    except ConfigError:
        return None
