"""Turns finished steps into figures: one StepReport a step, running totals for /metrics, the newest timeline."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.agent.calibration.saved import kept_card
from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.gradient_arrival import GradientArrival
from tidegate.agent.ranks import cpu_lane_threads
from tidegate.agent.telemetry import step_metrics
from tidegate.agent.telemetry.metric_store import Labels, Meter
from tidegate.agent.telemetry.paths import PathWatch
from tidegate.agent.telemetry.phase_forecast import Expected
from tidegate.agent.telemetry.plan_cache import RecentPlans
from tidegate.agent.telemetry.report import report_of
from tidegate.agent.telemetry.step_record import FinishedStep
from tidegate.client.daemon_client import state_dir
from tidegate.errors import ConfigError
from tidegate.logs import event
from tidegate.plan import Plan
from tidegate.simulator.simulate import update_seconds
from tidegate.speeds.dispatch_latency import Ran
from tidegate.speeds.live_rates import LiveRates
from tidegate.speeds.rate_card import RateCard, seen
from tidegate.timeline.timeline import Timeline
from tidegate.wire.step import StepReport

log = logging.getLogger("tidegate")

MAX_UNREPORTED_STEPS = 256
MAX_NOTED_STEPS = 16
"""Steps after which the training thread makes their figures itself, when nobody asked for them."""
PREDICTION_SHARE = 1e-4
"""Share of the time that predictions may take while the plan stays the same: a plan of 100 ops is looked at every few
seconds, a larger one less often."""


@dataclass
class _Prediction:
    """Of one plan's update. `look_at`: on the monotonic clock, in seconds; before, none is made anew."""

    seconds: float | None = None
    look_at: float = 0.0


@dataclass
class Totals:
    """What is known of the run beside its metrics."""

    steps: int = 0
    """The number of the last step."""
    last: StepReport | None = None
    predicted_update_seconds: float | None = None
    """Of the plan that ran last."""
    prediction_error: float | None = None
    delivery: GradientArrival = field(default_factory=GradientArrival)
    """Of all steps that were not skipped."""


class Recorder:
    """Fed by the training thread once a step, which only notes what has ended: figures are made a few steps at a time.

    Whoever reads figures first makes those of the steps noted so far. That is cheaper than one step at a time, when
    the processor has forgotten everything about it since the last, and it is mostly not the training thread's time.
    `lock` guards what several threads read.
    """

    def __init__(self, optimizer: AdamW) -> None:
        self.lock = threading.RLock()
        self.steps = 0
        """Steps noted."""
        self.number = optimizer.num_steps
        """Of the step noted last, as the optimizer counts them."""
        self.last_step: FinishedStep | None = None
        self.cpu_seconds = 0.0
        """CPU time of the training thread that recording has cost so far, the phase clock's included."""
        self.meter = Meter()
        """What /metrics shows; the holder of `lock` may use it."""
        self._optimizer = optimizer
        self._totals = Totals(steps=self.number)
        store = optimizer.engine.store
        self.path_names = tuple(store.paths) if store is not None else ()
        step_metrics.begin(self.meter, self.path_names)
        self._residences = ("host", "device", *self.path_names)
        self._noted: deque[FinishedStep] = deque()
        self._unreported: deque[StepReport] = deque(maxlen=MAX_UNREPORTED_STEPS)
        self._expected = Expected()
        self._deps: RecentPlans[dict[int, tuple[int, ...]]] = RecentPlans()
        """What each op waits for; the training thread's."""
        self._predictions: RecentPlans[_Prediction] = RecentPlans()
        """The holder of `lock` may use them."""
        self.begin()

    def begin(self) -> None:
        """No step has run on the optimizer's device and paths: what is known of them is known from before."""
        store, residences = self._optimizer.engine.store, self._optimizer.engine.residences
        with self.lock:
            self._paths = PathWatch(store, residences) if store is not None and residences is not None else None
            self.path_capacities = self._paths.capacities if self._paths is not None else {}
            self._live = LiveRates(_kept_card(self._optimizer))

    def count_from(self, steps: int) -> None:
        """The optimizer has another state, of so many steps: the next one is one more. What was not told of those
        before is not."""
        with self.lock:
            self.catch_up()
            self._unreported.clear()
            self.number = self._totals.steps = steps
            self.last_step = None

    def record(self, result: StepResult, phases: StepPhases) -> None:
        """Called when a step has ended."""
        began = time.thread_time()
        self.steps += 1
        self.number += 1
        deps = self._deps.get(result.plan)
        new_plan = deps is None
        if deps is None:
            deps = self._deps.add(result.plan, {op.id: op.deps for op in result.plan.ops})
        self.last_step = self._note(result, phases, deps)
        self._noted.append(self.last_step)
        if new_plan or len(self._noted) >= MAX_NOTED_STEPS:
            self.catch_up()
        self.cpu_seconds += time.thread_time() - began + phases.clock_cpu_seconds

    @property
    def totals(self) -> Totals:
        self.catch_up()
        return self._totals

    def rows(self, family: str) -> dict[Labels, float]:
        """A counter or gauge of finished steps, by label values."""
        with self.lock:
            self.catch_up()
            return dict(self.meter.rows(family))

    def seconds(self, family: str) -> dict[Labels, float]:
        """The sum of all observations of a histogram of finished steps, by label values."""
        with self.lock:
            self.catch_up()
            return {labels: histogram.total for labels, histogram in self.meter.histograms(family).items()}

    @property
    def rates(self) -> RateCard | None:
        """Speeds of the last steps (`LiveRates`); before the first, those that `tidegate calibrate` kept."""
        self.catch_up()
        with self.lock:
            return self._live_rates()

    @property
    def recalibrations(self) -> int:
        """How often a rate was taken anew, as far as figures are made."""
        return self._live.recalibrations

    @property
    def timeline(self) -> Timeline | None:
        """The newest step's; None before the first."""
        return None if self.last_step is None else self.last_step.timeline

    def take_unreported(self) -> tuple[StepReport, ...]:
        self.catch_up()
        with self.lock:
            taken = tuple(self._unreported)
            self._unreported.clear()
        return taken

    def give_back(self, steps: Sequence[StepReport]) -> None:
        """These could not be delivered: they come first next time, the oldest fall off."""
        with self.lock:
            later = list(self._unreported)
            self._unreported.clear()
            self._unreported.extend([*steps, *later])

    def _note(self, result: StepResult, phases: StepPhases, deps: dict[int, tuple[int, ...]]) -> FinishedStep:
        memory, sums = self._optimizer.engine.memory, self._optimizer.engine.gradients.sums
        host_bytes = memory.host_bytes()
        host_bytes["gradient"] += sums.host_bytes() if sums is not None else 0
        return FinishedStep(
            number=self.number,
            result=result,
            phases=phases,
            deps=deps,
            host_bytes=host_bytes,
            subgroups={where: memory.residence.count(where) for where in self._residences},
            paths=self._paths.note() if self._paths is not None else (),
        )

    def catch_up(self) -> None:
        """Makes the figures of the steps that are noted."""
        with self.lock:
            while self._noted:
                step = self._noted.popleft()
                try:
                    self._take(step)
                except Exception:
                    # Whoever asks for figures gets those of the other steps.
                    log.exception("step %d could not be recorded", step.number)

    def _take(self, step: FinishedStep) -> None:
        result = step.result
        # What was predicted of other plans says nothing about this one.
        prediction = self._predictions.get(result.plan) or self._predictions.add(result.plan, _Prediction())
        report, totals = report_of(step), self._totals
        error = step_metrics.add_step(self.meter, step, report, self._expected.with_update(prediction.seconds))
        self._expected.observe(report.phase_seconds)
        totals.prediction_error = totals.prediction_error if error is None else error
        totals.steps, totals.last = report.step, report
        if not result.skipped:
            totals.delivery += step.delivery
        self._unreported.append(report)
        for name in self._live.observe(seen(result.spans), _ran(step)):
            log.info("%s has changed for good: rates are taken anew", name, extra=event("rate_drifted", rate=name))
        if not result.skipped and all(later.result.plan is not result.plan for later in self._noted):
            self._predict(result.plan, prediction)
        totals.predicted_update_seconds = prediction.seconds
        step_metrics.expect(self.meter, self._expected.with_update(totals.predicted_update_seconds))

    def _live_rates(self) -> RateCard | None:
        card, store = self._live.card, self._optimizer.engine.store
        # What the split goes by: smoothed, and each direction as if the other were at rest.
        return card if card is None or store is None else card.with_paths(store.speeds)

    def _predict(self, plan: Plan, prediction: _Prediction) -> None:
        """What the next update with this plan will take, from the live rates."""
        began = time.monotonic()
        if began < prediction.look_at or (rates := self._live_rates()) is None:
            return
        try:
            prediction.seconds = update_seconds(plan, rates, step_at=self._backward_seconds())
        except ConfigError:
            return  # a rate that this plan needs was not seen yet
        now = time.monotonic()
        prediction.look_at = now + (now - began) / PREDICTION_SHARE

    def _backward_seconds(self) -> float:
        last = self._totals.last
        return last.phase_seconds.get("backward", 0.0) if last is not None else 0.0


def _ran(step: FinishedStep) -> Ran | None:
    """None for a skipped step."""
    result = step.result
    called = next((span.start for span in step.phases.spans if span.phase == "update"), None)
    return None if called is None or result.skipped else Ran(result.spans[result.num_dropped :], step.deps, called)


def _kept_card(optimizer: AdamW) -> RateCard | None:
    offload, store = optimizer.offload, optimizer.engine.store
    return kept_card(
        state_dir(),
        offload.path_settings(),
        store.speeds if store is not None else {},
        device=optimizer.device.kind,
        cpu_threads=offload.cpu_threads or cpu_lane_threads(),
    )
