"""Recorder of finished steps: one StepReport per step, metrics for /metrics, and the newest timeline."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachetools import LRUCache

from tidegate.agent.calibration.saved_rate_card import saved_rate_card
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.ranks import cpu_lane_threads
from tidegate.agent.telemetry import step_metrics
from tidegate.agent.telemetry.metric_store import Labels, MetricStore
from tidegate.agent.telemetry.paths import PathSampler
from tidegate.agent.telemetry.phase_forecast import PhaseForecast
from tidegate.agent.telemetry.report import report_of
from tidegate.agent.telemetry.step_sums import step_sums
from tidegate.client.discovery import state_dir
from tidegate.errors import ConfigError
from tidegate.logs import event
from tidegate.plan import Plan
from tidegate.simulator.simulate import update_seconds
from tidegate.speeds.dispatch_latency import StepTrace
from tidegate.speeds.live_rates import LiveRates
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.gradient_arrival import GradientArrival
from tidegate.timeline.step_record import FinishedStep
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import Timeline
from tidegate.wire.step import StepReport

log = logging.getLogger("tidegate")

MAX_UNREPORTED_STEPS = 256
"""Maximum number of step reports that wait to be sent to the daemon. The oldest ones are discarded."""
MAX_UNPROCESSED_STEPS = 16
"""Maximum number of steps that are recorded but not processed yet. When it is reached, the training thread processes
them."""
PREDICTION_SHARE = 1e-4
"""Largest share of time that the computation of predictions may take while the plan stays the same. For a plan of 100
ops a prediction is computed every few seconds, for a larger plan less often."""
RECENT_PLANS: Final = 2
"""Number of plans that a recorder knows. Two, because updates with the knob `order=alternate` use two plans in turn."""


@dataclass
class _KnownPlan:
    """A plan that ran recently, and what is computed once for it. `deps`: ids of the ops on which each op depends.
    `predicted_seconds`: prediction of the update. `refresh_at`: time on the monotonic clock, in seconds, from which the
    prediction is computed again."""

    plan: Plan
    deps: dict[int, tuple[int, ...]]
    predicted_seconds: float | None = None
    refresh_at: float = 0.0


@dataclass
class Totals:
    """Sums over all processed steps, and values of the last processed step, that are needed in addition to the
    metrics."""

    steps: int = 0
    """Number of the last processed step."""
    last: StepReport | None = None
    predicted_update_seconds: float | None = None
    """Predicted seconds of the next update, if it runs the same plan as the last step. None before the first
    prediction."""
    prediction_error: float | None = None
    gradient_arrival: GradientArrival = field(default_factory=GradientArrival)
    """Statistics of how gradients became available, for example the bytes that were copied to the host twice, and the
    time in the backward before the first gradient. Summed over all steps that were not skipped."""


class Recorder:
    """Records finished steps. The training thread only stores the raw data of each step. Reports and metrics are
    computed later, for several steps at a time.

    When a thread reads figures, it first processes all steps that were recorded since the last read. That takes less
    time in total than processing each step at its end, when the processor's caches are cold, and mostly no time of the
    training thread. `lock` guards the data that several threads read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.lock = threading.RLock()
        self.steps = 0
        """Number of steps recorded since this recorder was created."""
        self.number = optimizer.num_steps
        """Number of the last recorded step, as the optimizer counts."""
        self.last_step: FinishedStep | None = None
        self.cpu_seconds = 0.0
        """CPU seconds of the training thread for recording steps, including the measurements at phase boundaries."""
        self.metrics = MetricStore()
        """Metrics of finished steps and of the current state; guarded by `lock`."""
        self._optimizer = optimizer
        self._totals = Totals(steps=self.number)
        store = optimizer.engine.store
        self.path_names = tuple(store.paths) if store is not None else ()
        step_metrics.initialize(self.metrics, self.number, self.path_names)
        self._residences = ("host", "device", *self.path_names)
        self._unprocessed: deque[tuple[FinishedStep, _KnownPlan]] = deque()
        self._unreported: deque[StepReport] = deque(maxlen=MAX_UNREPORTED_STEPS)
        self._expected = PhaseForecast()
        self._plans: LRUCache[int, _KnownPlan] = LRUCache(RECENT_PLANS)
        """Recent plans by identity, because comparing their content costs more than all that is kept for them. Used by
        the training thread only; `lock` guards the predictions."""
        self.begin()

    def begin(self) -> None:
        """Restarts the measurement of rates and paths for a new device or new paths. Until a step has run, the rates
        are those of a saved calibration, if there is one."""
        store, residences = self._optimizer.engine.store, self._optimizer.engine.residences
        with self.lock:
            self._paths = PathSampler(store, residences) if store is not None and residences is not None else None
            self.path_capacities = self._paths.capacities if self._paths is not None else {}
            self._live = LiveRates(_saved_card(self._optimizer))

    def count_from(self, steps: int) -> None:
        """Sets the number of the last step, after the optimizer loaded another state. Steps that were not reported yet
        are discarded."""
        with self.lock:
            self.catch_up()
            self._unreported.clear()
            self.number = self._totals.steps = steps
            self.metrics.set_value("tidegate_step", steps)
            self.last_step = None

    def record(self, result: StepResult, phases: StepPhases) -> None:
        """Records a finished step: stores its raw data, and processes it later. Called by the training thread at the
        end of each step."""
        began = time.thread_time()
        self.steps += 1
        self.number += 1
        plan = result.plan
        new_plan = id(plan) not in self._plans
        if new_plan:
            self._plans[id(plan)] = _KnownPlan(plan, {op.id: op.deps for op in plan.ops})
        known = self._plans[id(plan)]
        self.last_step = self._raw_step(result, phases, known.deps)
        self._unprocessed.append((self.last_step, known))
        if new_plan or len(self._unprocessed) >= MAX_UNPROCESSED_STEPS:
            self.catch_up()
        self.cpu_seconds += time.thread_time() - began + phases.clock_cpu_seconds

    @property
    def totals(self) -> Totals:
        """Totals of all finished steps."""
        self.catch_up()
        return self._totals

    def rows(self, family: str) -> dict[Labels, float]:
        """Values of the counter or gauge named `family` after all recorded steps, by label values."""
        with self.lock:
            self.catch_up()
            return dict(self.metrics.rows(family))

    def seconds(self, family: str) -> dict[Labels, float]:
        """Sums of all observations of the histogram named `family` after all recorded steps, by label values. Series
        without observations are left out."""
        with self.lock:
            self.catch_up()
            series = self.metrics.histograms(family)
            return {labels: histogram.total for labels, histogram in series.items() if any(histogram.counts)}

    @property
    def rates(self) -> RateCard | None:
        """Rate card measured in the last steps (`LiveRates`). Before the first step it is the card that `tidegate
        calibrate` saved; None if there is none."""
        self.catch_up()
        with self.lock:
            return self._live_rates()

    @property
    def backward_seconds(self) -> float:
        """Typical seconds of the backward: a median of the last steps; 0 before the first."""
        self.catch_up()
        with self.lock:
            return self._expected.seconds("backward")

    @property
    def recalibrations(self) -> int:
        """Number of rates that have changed permanently in the processed steps, and were therefore measured again."""
        return self._live.recalibrations

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of the newest step; None before the first."""
        return None if self.last_step is None else self.last_step.timeline

    def take_unreported(self) -> tuple[StepReport, ...]:
        """Removes all step reports that wait to be sent to the daemon, and returns them, oldest first."""
        self.catch_up()
        with self.lock:
            taken = tuple(self._unreported)
            self._unreported.clear()
        return taken

    def give_back(self, steps: Sequence[StepReport]) -> None:
        """Takes back reports that could not be delivered: the next `take_unreported` returns them first. The oldest
        reports are discarded when there are too many."""
        with self.lock:
            newer = list(self._unreported)
            self._unreported.clear()
            self._unreported.extend([*steps, *newer])

    def _raw_step(self, result: StepResult, phases: StepPhases, deps: dict[int, tuple[int, ...]]) -> FinishedStep:
        memory, sums = self._optimizer.engine.memory, self._optimizer.engine.gradients.sums
        host_bytes = memory.host_bytes()
        host_bytes["gradient"] += sums.host_bytes() if sums is not None else 0
        before = self.last_step
        return FinishedStep(
            number=self.number,
            result=result,
            phases=phases,
            deps=deps,
            host_bytes=host_bytes,
            subgroups={where: memory.residence.count(where) for where in self._residences},
            paths=self._paths.sample() if self._paths is not None else (),
            previous_result=before.result if phases.waits_for_update and before is not None else None,
        )

    def catch_up(self) -> None:
        """Processes all recorded steps: computes their reports and metrics."""
        with self.lock:
            while self._unprocessed:
                step, known = self._unprocessed.popleft()
                try:
                    self._process(step, known)
                except Exception:
                    # Readers still get the figures of the other steps.
                    log.exception("step %d could not be recorded", step.number)

    def _process(self, step: FinishedStep, known: _KnownPlan) -> None:
        """Computes the report of one step, and updates metrics, rates and the prediction of its plan."""
        result, totals, sums = step.result, self._totals, step_sums(step)
        report = report_of(step, sums)
        expected = self._expected.with_update(known.predicted_seconds)
        error = step_metrics.add_step(self.metrics, step, report, expected)
        self._expected.observe(report.phase_seconds)
        totals.prediction_error = totals.prediction_error if error is None else error
        totals.steps, totals.last = report.step, report
        if not result.skipped:
            totals.gradient_arrival += sums.gradient_arrival
        self._unreported.append(report)
        for name in self._live.observe(sums.work, _ran(step)):
            log.info(
                "the measured speed %s has changed over several steps: its earlier measurements are discarded", name,
                extra=event("rate_drifted", rate=name),
            )  # fmt: skip
        if not result.skipped and all(later is not known for _, later in self._unprocessed):
            self._predict(known)
        totals.predicted_update_seconds = known.predicted_seconds
        step_metrics.set_forecast(self.metrics, self._expected.with_update(known.predicted_seconds))

    def _live_rates(self) -> RateCard | None:
        card, store = self._live.card, self._optimizer.engine.store
        # Speeds of paths as used for the split: smoothed, and each direction as if the other were idle.
        return card if card is None or store is None else card.with_paths(store.speeds)

    def _predict(self, known: _KnownPlan) -> None:
        """Predicts the seconds of the next update with this plan from the live rates. Does nothing before
        `known.refresh_at`."""
        began = time.monotonic()
        if began < known.refresh_at or (rates := self._live_rates()) is None:
            return
        try:
            known.predicted_seconds = update_seconds(known.plan, rates, step_at=self._expected.seconds("backward"))
        except ConfigError:
            return  # a rate that this plan needs was not measured yet
        now = time.monotonic()
        known.refresh_at = now + (now - began) / PREDICTION_SHARE


def _ran(step: FinishedStep) -> StepTrace | None:
    """Converts a finished step to the input of `LiveRates`: its spans and dependencies. None for a skipped step."""
    result = step.result
    called = next((span.start for span in step.phases.spans if span.phase == "update"), None)
    return (
        None if called is None or result.skipped else StepTrace(result.spans[result.num_dropped :], step.deps, called)
    )


def _saved_card(optimizer: Optimizer) -> RateCard | None:
    """Rate card of a saved calibration for this machine and these paths; None when there is none."""
    offload, store = optimizer.offload, optimizer.engine.store
    return saved_rate_card(
        state_dir(),
        offload.path_settings(),
        store.speeds if store is not None else {},
        device=optimizer.device.kind,
        cpu_threads=offload.cpu_threads or cpu_lane_threads(),
    )
