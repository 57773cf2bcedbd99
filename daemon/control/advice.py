"""Knob advice: the knobs that the model would choose, found with the rates that the run's lead rank reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Final

from tidegate.daemon.control.preview import MODEL_ERRORS, NO_RATES, PredictionInputs
from tidegate.errors import TidegateError
from tidegate.knobs.knobs import AUTO, Knobs, show, spec
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.residency import explicit_weights
from tidegate.plan.tier_split import balanced_split
from tidegate.simulator.steady_state import speeds_of, steady_steps
from tidegate.timeline.verdict import SMALL_WAIT_SHARE
from tidegate.tuner.search import CANDIDATE_RATIOS, best
from tidegate.tuner.tuner import MINIMUM_GAIN
from tidegate.wire.base import KnobChanges
from tidegate.wire.prediction import Advice

log = logging.getLogger(__name__)

UNUSABLE_REPORT: Final = "No advice: the figures that the ranks reported cannot be used; the daemon's log says why."
_Choice = tuple[EffectiveKnobs, float]
"""Knobs, and the predicted seconds of an update with these knobs."""


def advise(run: str, knobs: Knobs, inputs: PredictionInputs | None) -> Advice:
    """Recommended knobs. All knobs are considered except `host_cache`: only the rank knows how much memory is free.

    If the update waits for a path, a tier split that avoids the path comes first, and knobs that take more device
    memory are named beside it. Knobs that take device memory are recommended only if they fit in the memory that was
    free at the peak of its use, and a canary would keep them. The rank may still refuse. Slow: run it in a thread.
    """
    try:
        return _advise(run, knobs, inputs)
    except MODEL_ERRORS as error:
        log.warning("the reports of the ranks of run %s do not allow advice on knobs: %s", run, error)
        return Advice(run=run, sentence=UNUSABLE_REPORT)


def _advise(run: str, knobs: Knobs, inputs: PredictionInputs | None) -> Advice:
    if inputs is not None and inputs.unknown_policy:
        return Advice(run=run, sentence=inputs.unknown_policy)
    now = inputs.numbers(knobs) if inputs else None
    if inputs is None or now is None:
        return Advice(run=run, sentence=NO_RATES)
    try:
        found = inputs.predictor.predict(now)
        present, slow = found.update_seconds, _slow_path(found.stalls, found.update_seconds)
        chosen, beside = _choices(inputs, now, present, slow)
    except TidegateError as error:
        return Advice(run=run, sentence=f"No advice yet: {error}")
    if chosen is None:
        sentence = f"Nothing is predicted to take {MINIMUM_GAIN:.0%} off the update of {present:.3g} s."
        return Advice(run=run, predicted_update_seconds_now=present, sentence=sentence)
    changes, then = _changes(now, chosen[0]), chosen[1]
    sentences = [
        f"{_in_words(changes)} is predicted to take the update from {present:.3g} s to {then:.3g} s "
        f"({then / present - 1:+.0%}).",
        inputs.device_memory(_more_device_bytes(inputs, now, chosen[0])),
        f"Path {slow} holds no state then; tier_split=auto uses it again." if _avoids(chosen[0], slow) else "",
    ]
    if beside is not None:
        more = inputs.device_memory(_more_device_bytes(inputs, now, beside[0]))
        sentences += [f"{_in_words(_changes(now, beside[0]))} would take it to {beside[1]:.3g} s.", more]
    return Advice(
        run=run,
        changes=changes,
        predicted_update_seconds_now=present,
        predicted_update_seconds_then=then,
        sentence=" ".join(filter(None, sentences)),
    )


def _in_words(changes: KnobChanges) -> str:
    return " ".join(f"{name}={show(name, value)}" for name, value in changes.items())


def _slow_path(stalls: Mapping[str, float], update_seconds: float) -> str:
    """The path for which the update waits longest; empty if it waits longer for something else, or hardly at all."""
    cause, wait = max(stalls.items(), key=lambda item: item[1], default=("", 0.0))
    path, colon, _ = cause.partition(":")
    return path if colon and wait >= SMALL_WAIT_SHARE * update_seconds else ""


def _choices(
    inputs: PredictionInputs, now: EffectiveKnobs, present: float, slow: str
) -> tuple[_Choice | None, _Choice | None]:
    """The recommended knobs, and knobs that are better but take more device memory. Either is None if there are none.

    present: predicted seconds with the knobs `now`. slow: the path for which the update waits; empty for none.
    """
    splits = _other_splits(inputs, now, slow) if slow else []
    room = inputs.device_room_bytes
    found = _best(inputs, now, present, splits, _static_ratios(inputs, now), room)
    if found is None or not slow or _more_device_bytes(inputs, now, found[0]) <= 0:
        return found, None
    frugal = _best(inputs, now, present, splits, (), 0)
    if frugal is None or frugal[0].tier_split == now.tier_split:
        return found, None
    return frugal, found if found[1] < (1 - MINIMUM_GAIN) * frugal[1] else None


def _best(
    inputs: PredictionInputs,
    now: EffectiveKnobs,
    present: float,
    splits: Sequence[EffectiveKnobs],
    static_ratios: Sequence[float],
    room: int | None,
) -> _Choice | None:
    """The best knobs with a gain of MINIMUM_GAIN or more. Each of `splits` (knobs that differ from `now` in the tier
    split) must be better by as much than all before. room: device memory that may be taken; None if that is unknown."""
    found: _Choice | None = None
    for start, free in ((now, {"stride", "order", "tier_split"}), *((knobs, {"stride", "order"}) for knobs in splits)):
        better = best(
            inputs.predictor,
            start,
            free,
            below_seconds=(1 - MINIMUM_GAIN) * (found[1] if found else present),
            static_ratios=static_ratios,
            allowed=lambda then: room is None or _more_device_bytes(inputs, now, then) <= room,
        )
        found = better or found
    return found


def _other_splits(inputs: PredictionInputs, now: EffectiveKnobs, slow: str) -> list[EffectiveKnobs]:
    """The knobs `now` with a tier split that gives nothing to the path `slow` and divides the state among the other
    paths by their speeds; empty if there is no other path, or the others cannot hold the state."""
    rank = inputs.predictor.rank
    others = {path: slots for path, slots in rank.host_slots.items() if path != slow and path not in rank.retired}
    if not others:
        return []
    counts = balanced_split(len(rank.subgroups), speeds_of(inputs.predictor.rates, others))
    common = gcd(*counts.values())
    avoiding = replace(now, tier_split=tuple((path, float(n // common)) for path, n in sorted(counts.items()) if n))
    return [] if inputs.predictor.capacity_shortfall(avoiding) else [avoiding]


def _avoids(knobs: EffectiveKnobs, slow: str) -> bool:
    weights = dict(explicit_weights(knobs.tier_split))
    return bool(slow and weights) and not weights.get(slow)


def _static_ratios(inputs: PredictionInputs, now: EffectiveKnobs) -> tuple[float, ...]:
    """Values of `static_ratio` that may fit in the free device memory; empty if the memory use is unknown."""
    room = inputs.device_room_bytes
    if room is None:
        return ()
    state = sum(s.nbytes("state") for s in inputs.predictor.rank.subgroups)
    return tuple(ratio for ratio in CANDIDATE_RATIOS if (ratio - now.static_ratio) * state <= room)


def _more_device_bytes(inputs: PredictionInputs, now: EffectiveKnobs, then: EffectiveKnobs) -> int:
    """Device memory that the knobs `then` need in addition to `now`: for resident subgroups, and for staging slots
    (device buffers for the state of other subgroups during their update)."""
    rank, rates = inputs.predictor.rank, inputs.predictor.rates
    more, less = (max(step.device_bytes() for step in steady_steps(rank, knobs, rates)) for knobs in (then, now))
    return more - less


def _changes(now: EffectiveKnobs, then: EffectiveKnobs) -> KnobChanges:
    """The knobs that differ between the present and the recommended settings."""
    changes: KnobChanges = {}
    if then.stride != now.stride:
        changes["stride"] = then.stride
    if then.static_ratio != now.static_ratio:
        changes["static_ratio"] = then.static_ratio
    if then.alternate != now.alternate:
        changes["order"] = "alternate" if then.alternate else "pinned"
    if then.tier_split != now.tier_split:
        changes["tier_split"] = spec("tier_split").parse(dict(explicit_weights(then.tier_split)) or AUTO)
    return changes
