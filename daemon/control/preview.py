"""What a change of knobs would do to the update, asked of the simulator with the run's own rates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Final

from tidegate.daemon.control.run import Member, Run
from tidegate.errors import ConfigError, TidegateError
from tidegate.knobs.knobs import AUTO, EQ1, OFF, Knobs, KnobValue, same, show, weights_of
from tidegate.plan.effective_knobs import Effective, Split
from tidegate.plan.ops import Subgroup
from tidegate.simulator.path_capacity import no_room
from tidegate.simulator.prediction_interval import band
from tidegate.simulator.steady_state import Rank, settled
from tidegate.simulator.what_if import predicted_seconds, what_if
from tidegate.speeds.rate_card import RateCard
from tidegate.tuner.search import CANDIDATE_RATIOS, best
from tidegate.tuner.tuner import MINIMUM_GAIN
from tidegate.wire.agent import AgentHello
from tidegate.wire.base import KnobChanges
from tidegate.wire.prediction import Advice, KnobPreview, PredictedUpdate
from tidegate.wire.step import StepReport

log = logging.getLogger(__name__)

NO_RATES: Final = "No prediction yet: it needs the rates of a few steps."
OF_NO_USE: Final = "No advice: what the ranks told is of no use; the daemon's log says why."
_OF_NO_USE: Final = (TidegateError, ArithmeticError, ValueError, TypeError)
"""What the model raises where ranks told figures that cannot be true together: each alone was checked when it came."""
NO_ROOM: Final = "No prediction: there is no room for it."


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of the lead rank: sizes, speeds, and what its recent steps took."""

    hello: AgentHello
    rates: RateCard
    effective: Mapping[str, KnobValue]
    """What `auto` stands for."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Medians of the last steps, as they were measured."""
    error_ratio: float | None = None
    ratios: tuple[float, ...] = ()
    """Updates of the last steps as measured, by what is predicted of the present plan."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Most subgroups of each path, 0 for retired ones; without limit where absent."""
    device_free_bytes: int | None = None
    """What was never used of the device's memory in the last steps; None where nobody has told."""

    @property
    def unknown_policy(self) -> str:
        """Why nothing can be predicted of it, as a sentence; empty where it can."""
        policy = self.hello.policy
        known = policy == "interleaved"
        return "" if known else f"No prediction: the model knows the interleaved policy, and this run is {policy}."

    @cached_property
    def rank(self) -> Rank:
        """The rank as the simulator takes it. There may be many subgroups: not for the event loop."""
        hello = self.hello
        kinds = [Subgroup(0, s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in hello.subgroups]
        repeated = [kind for kind, sizes in zip(kinds, hello.subgroups, strict=True) for _ in range(sizes.count)]
        return Rank(
            subgroups=tuple(replace(subgroup, id=number) for number, subgroup in enumerate(repeated)),
            num_slots=hello.num_slots,
            host_slots=dict.fromkeys(hello.paths, hello.host_slots),
            gradients=hello.gradients,
            capacity=self.capacity,
        )

    def predict(self, knobs: Knobs) -> PredictedUpdate | None:
        """None when a rate that these knobs need was never measured, or the policy is none that the model knows."""
        wanted = self.numbers(knobs) if not self.unknown_policy else None
        if wanted is None:
            return None
        try:
            found = what_if(self.rank, wanted, self.rates, backward_seconds=self.phase_seconds.get("backward"))
        except TidegateError as error:
            log.info("no prediction: %s", error)
            return None
        likely = band(found.update_seconds, self.ratios)
        return PredictedUpdate(
            update_seconds=found.update_seconds,
            low_seconds=None if likely is None else likely.low,
            high_seconds=None if likely is None else likely.high,
            stalls=found.stalls,
            lane_bytes=found.link_bytes,
            host_memory_bytes=found.host_bytes,
            device_memory_bytes=found.device_bytes,
            bound_seconds=found.least.seconds,
            bound_by=found.least.resource,
        )

    def no_room(self, knobs: Knobs) -> str:
        """Which path cannot hold what these knobs give it, as a sentence; empty when all can, or nothing is known."""
        wanted = self.numbers(knobs) if not self.unknown_policy and self.hello.paths else None
        try:
            return no_room(self.rank, wanted, self.rates) if wanted is not None else ""
        except ConfigError:  # a speed was never measured
            return ""

    def numbers(self, knobs: Knobs) -> Effective | None:
        """The knobs as numbers; None while the rank has not told what `auto` stands for."""
        values = {
            name: self.effective.get(name, AUTO) if value == AUTO and name != "tier_split" else value
            for name, value in knobs.as_dict(paths=True).items()
        }
        stride, cache = values["stride"], values["host_cache"]
        if stride == AUTO or (cache == AUTO and self.rank.host_slots):
            return None
        return Effective(
            stride=OFF if stride == OFF else float(stride),
            static_ratio=knobs.static_ratio,
            tier_split=_split(str(values["tier_split"])),
            host_cache_bytes=0 if cache == AUTO else int(cache),
            alternate=values["order"] == "alternate",
        )


def _split(text: str) -> Split:
    if text == EQ1:
        return EQ1
    return None if text == AUTO else tuple(weights_of(text).items())


def evidence(run: Run) -> Evidence | None:
    """None until the lead rank has told its sizes and rates, and where what it told is of no use."""
    try:
        return _evidence(run)
    except _OF_NO_USE as error:
        log.warning("what the ranks of run %s told is of no use for predictions: %s", run.name, error)
        return None


def _evidence(run: Run) -> Evidence | None:
    if run.lead is None or run.lead[1].rates is None or not run.lead[1].hello.subgroups:
        return None
    member = run.lead[1]
    rates = run.lead[1].rates
    steps = [step for step in member.recent if not step.skipped]
    phases = dict.fromkeys(phase for step in steps for phase in step.phase_seconds)
    return Evidence(
        hello=member.hello,
        rates=RateCard.from_dict(rates.model_dump()),
        effective=member.effective,
        phase_seconds={phase: median(step.phase_seconds.get(phase, 0.0) for step in steps) for phase in phases},
        error_ratio=_error_ratio(member, steps),
        ratios=_ratios(member, steps),
        capacity=_capacity(member),
        device_free_bytes=_device_free_bytes(member, steps),
    )


def _capacity(member: Member) -> dict[str, int]:
    states = member.recent[-1].path_states if member.recent else ()
    held = {state.path: 0 if state.retired else state.capacity_subgroups for state in states}
    return {path: most for path, most in held.items() if most is not None}


def _device_free_bytes(member: Member, steps: list[StepReport]) -> int | None:
    peaks = [peak for step in steps for peak in step.device_memory_peak_bytes.values()]
    memory = member.hello.device_memory_bytes
    return None if memory is None or not peaks else max(0, memory - max(peaks))


def _error_ratio(member: Member, steps: list[StepReport]) -> float | None:
    """None while there is nothing to compare."""
    ratios = _ratios(member, steps)
    return abs(1 / median(ratios) - 1) if ratios else None


def _ratios(member: Member, steps: list[StepReport]) -> tuple[float, ...]:
    # What goes on in the next forward is the update's, too.
    measured = [step.phase_seconds.get("update", 0.0) + step.spill_seconds for step in steps]
    predicted = member.predicted_update_seconds
    return tuple(seconds / predicted for seconds in measured if seconds > 0) if predicted else ()


def preview(
    run: str, generation: int, before: Knobs, after: Knobs, known: Evidence | None, *, paths: bool
) -> KnobPreview:
    """The difference, and what is predicted of the update before and after. Slow enough to keep off the event loop.

    paths: whether the run has storage paths, and so their knobs.
    """
    try:
        return _preview(run, generation, before, after, known, paths=paths)
    except _OF_NO_USE as error:
        log.warning("no preview for run %s from what its ranks told: %s", run, error)
        return _preview(run, generation, before, after, None, paths=paths)


def _preview(
    run: str, generation: int, before: Knobs, after: Knobs, known: Evidence | None, *, paths: bool
) -> KnobPreview:
    old, new = before.as_dict(paths=paths), after.as_dict(paths=paths)
    now, then = (known.predict(knobs) if known else None for knobs in (before, after))
    full = known.no_room(after) if known else ""
    unknown = (known and known.unknown_policy) or (NO_ROOM if full else NO_RATES)
    return KnobPreview(
        run=run,
        generation=generation,
        before=old,
        after=new,
        changed={name: value for name, value in new.items() if not same(name, value, old[name])},
        predicted_update_seconds_before=now.update_seconds if now else None,
        predicted_update_seconds_after=then.update_seconds if then else None,
        predicted_before=now,
        predicted_after=then,
        predicted_phase_seconds_after={**known.phase_seconds, "update": then.update_seconds} if known and then else {},
        error_ratio=known.error_ratio if known and then else None,
        no_prediction="" if now is not None and then is not None else unknown,
        no_room=full,
    )


def advise(run: str, knobs: Knobs, known: Evidence | None) -> Advice:
    """What the model would choose of all knobs but the host cache, for which only the rank knows what is free.

    More residents are advised where the device had memory left at its peak for them. The rank may still refuse. Slow
    enough to keep off the event loop.
    """
    try:
        return _advise(run, knobs, known)
    except _OF_NO_USE as error:
        log.warning("no advice for run %s from what its ranks told: %s", run, error)
        return Advice(run=run, sentence=OF_NO_USE)


def _advise(run: str, knobs: Knobs, known: Evidence | None) -> Advice:
    if known is not None and known.unknown_policy:
        return Advice(run=run, sentence=known.unknown_policy)
    now = known.numbers(knobs) if known else None
    if known is None or now is None:
        return Advice(run=run, sentence=NO_RATES)
    backward = known.phase_seconds.get("backward")
    try:
        present = predicted_seconds(known.rank, now, known.rates, backward_seconds=backward)
        found = best(
            known.rank,
            now,
            known.rates,
            {"stride", "order", "tier_split"},
            below_seconds=(1 - MINIMUM_GAIN) * present,
            backward_seconds=backward,
            static_ratios=_static_ratios(known, now),
            allowed=lambda then: _fits(known, now, then),
        )
    except TidegateError as error:
        return Advice(run=run, sentence=f"No advice yet: {error}")
    if found is None:
        sentence = f"Nothing is predicted to take {MINIMUM_GAIN:.0%} off the update of {present:.3g} s."
        return Advice(run=run, predicted_update_seconds_now=present, sentence=sentence)
    changes, then = _changes(knobs, now, found[0]), found[1]
    words = " ".join(f"{name}={show(name, value)}" for name, value in changes.items())
    return Advice(
        run=run,
        changes=changes,
        predicted_update_seconds_now=present,
        predicted_update_seconds_then=then,
        sentence=f"{words} is predicted to take the update from {present:.3g} s to {then:.3g} s "
        f"({then / present - 1:+.0%}).",
    )


def _static_ratios(known: Evidence, now: Effective) -> tuple[float, ...]:
    """Others that the device may have room for; none where nobody has told what it uses."""
    free = known.device_free_bytes
    if free is None:
        return ()
    state = sum(s.nbytes("state") for s in known.rank.subgroups)
    return tuple(ratio for ratio in CANDIDATE_RATIOS if (ratio - now.static_ratio) * state <= free)


def _fits(known: Evidence, now: Effective, then: Effective) -> bool:
    """Residents and staging slots in what is free of the device, as far as that is known: the rank may still refuse."""
    free = known.device_free_bytes
    if free is None:
        return True
    more, less = (settled(known.rank, knobs, known.rates)[0].device_bytes() for knobs in (then, now))
    return more - less <= free


def _changes(knobs: Knobs, now: Effective, then: Effective) -> KnobChanges:
    """The knobs that differ."""
    changes: KnobChanges = {}
    if then.stride != now.stride:
        changes["stride"] = then.stride
    if then.static_ratio != now.static_ratio:
        changes["static_ratio"] = then.static_ratio
    if then.alternate != now.alternate:
        changes["order"] = "alternate" if then.alternate else "pinned"
    if then.tier_split is None and knobs.tier_split != AUTO:
        changes["tier_split"] = AUTO
    return changes
