"""Prediction of a knob change (dry run), simulated with the rates that the run's lead rank reported."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Final

from tidegate import units
from tidegate.daemon.control.run import Member, Run
from tidegate.errors import ConfigError, TidegateError
from tidegate.knobs.kinds import larger_than_state, show_size
from tidegate.knobs.knobs import AUTO, OFF, Knobs, KnobValue, same
from tidegate.plan.effective_knobs import EffectiveKnobs, resolve
from tidegate.plan.ops import path_lanes
from tidegate.simulator.prediction_interval import prediction_interval
from tidegate.simulator.predictor import Predictor, predictor_of
from tidegate.simulator.what_if import Prediction
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import AgentHello, Rates
from tidegate.wire.canary import CanaryRequest
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.prediction import KnobPreview, PredictedUpdate
from tidegate.wire.step import StepReport

log = logging.getLogger(__name__)

NO_RATES: Final = "No prediction yet: it needs the rates of a few steps."
MODEL_ERRORS: Final = (TidegateError, ArithmeticError, ValueError, TypeError)
"""Exceptions that the model may raise if figures that ranks have reported contradict each other, although each figure
alone is valid."""
NO_ROOM: Final = "No prediction: the state does not fit with these knobs."
LITTLE_BYTES: Final = 64 << 20
"""A path on which the last steps moved fewer bytes, and less than one step would, has no speed to rely on."""
CHOSEN_BY_RANK: Final = ("stride", "order", "host_cache")
"""Knobs for which only the rank knows what `auto` will be: it finds out after the change."""


@dataclass(frozen=True, kw_only=True)
class PredictionInputs:
    """Inputs of a prediction, as the lead rank reported them: sizes, rates, and times of its recent steps."""

    hello: AgentHello
    rates: Rates
    evidence: ModelEvidence
    effective: Mapping[str, KnobValue]
    """The values that the rank uses for knobs with the value `auto`."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Median measured seconds of each phase in the last steps."""
    measured_seconds: tuple[float, ...] = ()
    """Measured seconds of the last updates under the present knobs."""
    path_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the last steps moved on each path; a path without bytes is absent."""
    steps: int = 0
    """Number of these steps."""
    device_free_bytes: int | None = None
    """Device memory that was never used in the last steps; None if unknown."""

    @property
    def unknown_policy(self) -> str:
        """Why the model cannot predict this run, as a sentence; empty where it can. It can if the run's policy (how its
        plan orders the ops) is `interleaved`."""
        policy = self.hello.policy
        if policy == "interleaved":
            return ""
        return f"No prediction: the model predicts only policy=interleaved, and this run has policy={policy}."

    @cached_property
    def predictor(self) -> Predictor:
        """The predictor of the rank. There may be many subgroups, so do not call this on the event loop."""
        return predictor_of(self.hello, self.evidence, RateCard.from_dict(self.rates.model_dump()))

    def predict(self, knobs: Knobs) -> Prediction | None:
        """The predicted update with these knobs; None if a rate or a value for `auto` that it needs is not known, or if
        the run's policy (how its plan orders the ops) is not `interleaved`."""
        wanted = self.numbers(knobs) if not self.unknown_policy else None
        if wanted is None:
            return None
        try:
            return self.predictor.predict(wanted)
        except TidegateError as error:
            log.info("the effect of a change of knobs cannot be predicted: %s", error)
            return None

    def capacity_shortfall(self, knobs: Knobs) -> str:
        """A sentence that names the path that is too small for its share of subgroups with these knobs. Empty if every
        path is large enough, or if this is unknown."""
        wanted = self.numbers(knobs) if not self.unknown_policy and self.hello.paths else None
        try:
            return self.predictor.capacity_shortfall(wanted) if wanted is not None else ""
        except ConfigError:  # a speed was never measured
            return ""

    @property
    def device_room_bytes(self) -> int | None:
        """Device memory that a change may take so that a canary keeps it: the free memory without the share that must
        stay free. None if unknown."""
        if self.device_free_bytes is None:
            return None
        return max(
            0, self.device_free_bytes - int(CanaryRequest().min_headroom * (self.hello.device_memory_bytes or 0))
        )

    def device_memory(self, more_bytes: int) -> str:
        """A sentence on a change that takes `more_bytes` of device memory more than the present knobs; empty if it does
        not take more."""
        free = self.device_free_bytes
        if more_bytes <= 0:
            return ""
        fits = "how much is free is not known" if free is None else f"{units.nbytes(free)} are free"
        too_large = ": it does not fit" if free is not None and more_bytes > free else ""
        return f"It takes {units.nbytes(more_bytes)} more of device memory; {fits}{too_large}."

    def notes(self, before: Knobs, after: Knobs, now: Prediction | None, then: Prediction | None) -> tuple[str, ...]:
        """What to know of a change besides the predictions before (`now`) and after it (`then`), as sentences."""
        found = [self.device_memory(then.device_bytes - now.device_bytes)] if now and then else []
        state = sum(s.nbytes("state") for s in self.predictor.rank.subgroups)
        if after.host_cache not in (AUTO, before.host_cache) and int(after.host_cache) > state:
            found.append(larger_than_state(int(after.host_cache), state, self.hello.rank))
        moves = {} if then is None else then.link_bytes
        for path in self.hello.paths:
            moved, per_step = self.path_bytes.get(path, 0), sum(moves.get(lane, 0) for lane in path_lanes(path))
            if moved < min(per_step, LITTLE_BYTES):
                found.append(
                    f"Speed of {path} from little: the last {self.steps} steps moved {units.nbytes(moved)} there, one "
                    f"step would move {units.nbytes(per_step)}. The prediction may be far off: try it with a canary."
                )
        return tuple(filter(None, found))

    def numbers(self, knobs: Knobs) -> EffectiveKnobs | None:
        """The knobs as numbers; None while the rank has not reported its values for `auto`."""
        stride, cache = self.effective.get("stride", AUTO), self.effective.get("host_cache", AUTO)
        if knobs.stride == AUTO == stride or (knobs.host_cache == AUTO == cache and self.hello.paths):
            return None
        return resolve(
            knobs,
            stride=OFF if stride in (AUTO, OFF) else float(stride),
            alternate=self.effective.get("order") == "alternate",
            cache_bytes=0 if cache == AUTO else int(cache),
        )


def _message(found: Prediction, ratios: Sequence[float]) -> PredictedUpdate:
    """A prediction as a message. ratios: measured divided by predicted seconds of steps under the present knobs; the
    predictions were made by the same predictor."""
    likely = prediction_interval(found.update_seconds, ratios)
    return PredictedUpdate(
        update_seconds=found.update_seconds,
        low_seconds=None if likely is None else likely.low,
        high_seconds=None if likely is None else likely.high,
        stalls=found.stalls,
        lane_bytes=found.link_bytes,
        host_memory_bytes=found.host_bytes,
        device_memory_bytes=found.device_bytes,
        bound_seconds=found.lower_bound.seconds,
        bound_by=found.lower_bound.resource,
    )


def prediction_inputs(run: Run) -> PredictionInputs | None:
    """The prediction inputs of a run; None until the lead rank has reported usable sizes and rates."""
    try:
        return _prediction_inputs(run)
    except MODEL_ERRORS as error:
        log.warning("the reports of the ranks of run %s cannot be used for predictions: %s", run.name, error)
        return None


def _prediction_inputs(run: Run) -> PredictionInputs | None:
    if run.lead is None or run.lead[1].rates is None or not run.lead[1].hello.subgroups:
        return None
    member = run.lead[1]
    steps = [step for step in member.recent if not step.skipped]
    phases = dict.fromkeys(phase for step in steps for phase in step.phase_seconds)
    typical = {phase: median(step.phase_seconds.get(phase, 0.0) for step in steps) for phase in phases}
    # An agent of the version before sends no evidence.
    states = member.recent[-1].path_states if member.recent else ()
    retired = {state.path: 0 for state in states if state.retired}
    evidence = ModelEvidence(
        backward_seconds=typical.get("backward"),
        capacity={s.path: s.capacity_subgroups for s in states if s.capacity_subgroups is not None} | retired,
        retired=tuple(retired),
    )
    first = member.applied.get(run.control.committed.number, 0)
    # State that is still spilled during the next forward belongs to the update, too.
    measured = [step.phase_seconds.get("update", 0.0) + step.spill_seconds for step in steps if step.step >= first]
    moved = Counter[str]()
    for row in (row for step in steps for row in step.paths):
        moved[row.path] += row.bytes
    return PredictionInputs(
        hello=member.hello,
        rates=run.lead[1].rates,
        evidence=member.evidence or evidence,
        effective=member.effective,
        phase_seconds=typical,
        measured_seconds=tuple(seconds for seconds in measured if seconds > 0),
        path_bytes=dict(moved),
        steps=len(steps),
        device_free_bytes=_device_free_bytes(member, steps),
    )


def _device_free_bytes(member: Member, steps: list[StepReport]) -> int | None:
    peaks = [peak for step in steps for peak in step.device_memory_peak_bytes.values()]
    memory = member.hello.device_memory_bytes
    return None if memory is None or not peaks else max(0, memory - max(peaks))


def preview(
    run: str,
    generation: int,
    before: Knobs,
    after: Knobs,
    inputs: PredictionInputs | None,
    *,
    paths: bool,
    refusal: str = "",
) -> KnobPreview:
    """The changed knobs, and the predicted update before and after the change. Slow: run it in a thread.

    generation: number of the generation that the change is based on. paths: whether the run has storage paths; without
    paths the preview leaves out the knobs of storage. refusal: why a rank will refuse the change, where that is known;
    then nothing is predicted.
    """
    try:
        return _preview(run, generation, before, after, inputs, paths=paths, refusal=refusal)
    except MODEL_ERRORS as error:
        log.warning("the reports of the ranks of run %s do not allow a preview of knobs: %s", run, error)
        return _preview(run, generation, before, after, None, paths=paths, refusal=refusal)


def _preview(
    run: str,
    generation: int,
    before: Knobs,
    after: Knobs,
    inputs: PredictionInputs | None,
    *,
    paths: bool,
    refusal: str,
) -> KnobPreview:
    old, new = before.as_dict(paths=paths), after.as_dict(paths=paths)
    to_auto = [name for name in CHOSEN_BY_RANK if new.get(name) == AUTO != old.get(name)]
    now = inputs.predict(before) if inputs else None
    then = inputs.predict(after) if inputs and not to_auto and not refusal else None
    # The errors of this predictor for the present knobs; all updates of a run may be predicted as too short, say.
    ratios = [seconds / now.update_seconds for seconds in inputs.measured_seconds] if inputs and now else []
    full = inputs.capacity_shortfall(after) if inputs and not refusal else ""
    reasons = [refusal, inputs.unknown_policy if inputs else NO_RATES, NO_ROOM if full else ""]
    if to_auto:
        reasons.append(_chosen_later(to_auto, inputs))
    unknown = next((reason for reason in reasons if reason), NO_RATES)
    return KnobPreview(
        run=run,
        generation=generation,
        before=old,
        after=new,
        changed={name: value for name, value in new.items() if not same(name, value, old[name])},
        predicted_update_seconds_before=now.update_seconds if now else None,
        predicted_update_seconds_after=then.update_seconds if then else None,
        predicted_before=_message(now, ratios) if now else None,
        predicted_after=_message(then, ratios) if then else None,
        predicted_phase_seconds_after={**inputs.phase_seconds, "update": then.update_seconds}
        if inputs and then
        else {},
        error_ratio=abs(1 / median(ratios) - 1) if ratios and then else None,
        no_prediction="" if now is not None and then is not None else unknown,
        no_room=full,
        notes=inputs.notes(before, after, now, then) if inputs and not refusal else (),
    )


def _chosen_later(names: Sequence[str], inputs: PredictionInputs | None) -> str:
    """The sentence that says why a change to `auto` of the knobs `names` is not predicted, and what can be."""
    text = f"No prediction: the ranks choose {' and '.join(names)} after the change."
    cache = inputs.evidence.automatic_cache_bytes if inputs and "host_cache" in names else None
    if inputs is None or cache is None:
        return f"{text} A value can be predicted."
    value = show_size(float(f"{cache / 2**20:.3g}") * 2**20)
    return (
        f"{text} host_cache=auto would be {value} on rank {inputs.hello.rank} now; preview a number to see its effect: "
        f"host_cache={value}."
    )
