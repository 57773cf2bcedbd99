"""Turns finished steps into figures: one StepReport a step, running totals for /metrics, the newest timeline."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.optimizer import AdamW
from tidegate.agent.telemetry import figures
from tidegate.agent.telemetry.finished import FinishedStep
from tidegate.agent.telemetry.meter import Labels, Meter
from tidegate.agent.telemetry.paths import PathWatch
from tidegate.agent.telemetry.phases import StepPhases
from tidegate.agent.telemetry.report import report_of
from tidegate.errors import ConfigError
from tidegate.model.rates import RateCard, seen
from tidegate.model.simulate import update_seconds
from tidegate.plan import Plan
from tidegate.timeline import Span, Timeline
from tidegate.wire import StepReport

log = logging.getLogger("tidegate")

MAX_UNREPORTED_STEPS = 256
MAX_NOTED_STEPS = 16
"""Steps after which the training thread makes their figures itself, when nobody asked for them."""
PREDICTION_SHARE = 3e-4
"""Share of the time that predictions may take while the plan stays the same: a plan of 100 ops is looked at about once
a second, a larger one less often."""
RATE_WINDOW = 5
"""Steps that the live rate card is made from."""


@dataclass
class Totals:
    """What is known of the run beside its metrics."""

    steps: int = 0
    last: StepReport | None = None
    predicted_update_seconds: float | None = None
    prediction_error: float | None = None


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
        self.last_step: FinishedStep | None = None
        self.cpu_seconds = 0.0
        """CPU time of the training thread that recording has cost so far, the phase clock's included."""
        self.meter = Meter()
        """What /metrics shows; the holder of `lock` may use it."""
        self._optimizer = optimizer
        self._totals = Totals()
        store = optimizer.engine.store
        self.path_names = tuple(store.paths) if store is not None else ()
        figures.begin(self.meter, self.path_names)
        self._paths = PathWatch(store) if store is not None else None
        self.path_capacities = self._paths.capacities if self._paths is not None else {}
        self._residences = ("host", "device", *self.path_names)
        self._noted: deque[FinishedStep] = deque()
        self._unreported: deque[StepReport] = deque(maxlen=MAX_UNREPORTED_STEPS)
        self._rates: RateCard | None = None
        self._rates_are_old = False
        self._recent: deque[tuple[Span, ...]] = deque(maxlen=RATE_WINDOW)
        self._plan: Plan | None = None
        self._deps: dict[int, tuple[int, ...]] = {}
        self._predicted_plan: Plan | None = None
        self._predict_at = 0.0

    def record(self, result: StepResult, phases: StepPhases) -> None:
        """Called when a step has ended."""
        began = time.thread_time()
        self.steps += 1
        other_plan = result.plan is not self._plan
        if other_plan:
            self._plan, self._deps = result.plan, {op.id: op.deps for op in result.plan.ops}
        self.last_step = self._note(result, phases)
        self._noted.append(self.last_step)
        if other_plan or len(self._noted) >= MAX_NOTED_STEPS:
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
        """Speeds of the last steps; None before the first."""
        self.catch_up()
        with self.lock:
            return self._live_rates()

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

    def _note(self, result: StepResult, phases: StepPhases) -> FinishedStep:
        memory = self._optimizer.engine.memory
        return FinishedStep(
            number=self.steps,
            result=result,
            phases=phases,
            deps=self._deps,
            host_bytes=memory.host_bytes(),
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
        if result.plan is not self._predicted_plan:
            # What was predicted was another plan's.
            self._totals.predicted_update_seconds, self._predict_at = None, 0.0
            self._predicted_plan = result.plan
        report, totals = report_of(step), self._totals
        error = figures.add_step(self.meter, step, report, totals.predicted_update_seconds)
        totals.prediction_error = totals.prediction_error if error is None else error
        totals.steps, totals.last = report.step, report
        self._unreported.append(report)
        self._recent.append(result.spans)
        self._rates_are_old = True
        if not result.skipped and not self._noted:
            self._predict(result.plan)
        figures.expect(self.meter, totals.predicted_update_seconds)

    def _live_rates(self) -> RateCard | None:
        if self._rates_are_old:
            self._rates = RateCard.from_seen([seen(spans) for spans in self._recent], previous=self._rates)
            self._rates_are_old = False
        return self._rates

    def _predict(self, plan: Plan) -> None:
        """What the next update will take if the plan stays, from the live rates."""
        began = time.monotonic()
        if began < self._predict_at or (rates := self._live_rates()) is None:
            return
        try:
            self._totals.predicted_update_seconds = update_seconds(plan, rates, step_at=self._backward_seconds())
        except ConfigError:
            return  # a rate that this plan needs was not seen yet
        now = time.monotonic()
        self._predict_at = now + (now - began) / PREDICTION_SHARE

    def _backward_seconds(self) -> float:
        last = self._totals.last
        return last.phase_seconds.get("backward", 0.0) if last is not None else 0.0
