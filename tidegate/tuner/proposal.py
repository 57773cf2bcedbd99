"""Proposal of the tuner: the best knobs according to the simulator, and their predicted gain over the present ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tidegate.errors import ConfigError
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.simulator.predictor import Predictor
from tidegate.speeds.rate_card import RateCard
from tidegate.tuner.search import START_STRIDE, best
from tidegate.tuner.tuner import MINIMUM_GAIN, Move


def find_move(
    predictor: Predictor,
    now: EffectiveKnobs,
    free: Collection[str],
    *,
    cache_bytes: int = 0,
    allowed: Callable[[EffectiveKnobs], bool] = lambda _: True,
) -> Move | None:
    """Searches the best knobs by the model; None if their predicted gain is below MINIMUM_GAIN.

    free: names of the knobs that may differ from `now`. cache_bytes: size to which the host cache may grow. allowed:
    returns whether knobs fit on this rank. A stride cannot be predicted while nothing is updated on the CPU, or nothing
    on the device. If that is so and no other knobs are better, the move is a probe (an experiment) with the stride
    START_STRIDE, because then both speeds are measured.
    """
    try:
        present = predictor.update_seconds(now)
        choice = best(
            predictor, now, free,
            cache_bytes=cache_bytes, below_seconds=(1 - MINIMUM_GAIN) * present, allowed=allowed,
        )  # fmt: skip
    except ConfigError:
        return None  # a rate that the present knobs need was not measured yet
    if choice is not None:
        return Move(choice[0], 1 - choice[1] / present)
    if "stride" not in free or predictor.rank.num_slots == 0 or _all_rates_known(predictor.rates):
        return None
    probe = replace(now, stride=START_STRIDE)
    unknown = predicted_seconds_or_none(predictor, probe) is None
    return Move(probe, None) if unknown and allowed(probe) else None


def _all_rates_known(rates: RateCard) -> bool:
    """Whether all rates are known that any stride needs; a check without making a plan."""
    both = (rates.cpu_params_per_second, rates.device_params_per_second)
    return None not in (*both, rates.h2d_bytes_per_second, rates.d2h_bytes_per_second)


def predicted_seconds_or_none(predictor: Predictor, knobs: EffectiveKnobs) -> float | None:
    """The predicted seconds of the update under these knobs; None while a rate is not known that they need."""
    try:
        return predictor.update_seconds(knobs)
    except ConfigError:
        return None
