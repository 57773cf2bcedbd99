"""Computes Tidegate's figures for the entries of a framework's log: the seconds of updates and of stalls since the last
entry, and a verdict, which is one sentence that says what the updates waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tidegate.agent.control.attachment import Attachment
from tidegate.agent.optimizer.gradient_arrival import GradientArrival
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.timeline.verdict import UpdateFigures, verdict

PREFIX: Final = "tidegate_"
"""Prefix of the names of Tidegate's figures in a framework's log."""
VERDICT: Final = f"{PREFIX}verdict"
"""Name of the verdict in a framework's log. It is the only value that is a sentence."""


class LogFigures:
    """Computes the figures of one attached optimizer for a framework's log: seconds of updates and of stalls, and a
    verdict on what the updates waited for."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        self._attachment, self._optimizer = attachment, optimizer
        self._before = _Cumulative()

    def since_last(self) -> dict[str, Any]:
        """Figures since the last call: `tidegate_update_seconds` and `tidegate_stall_seconds`, summed over the steps,
        and `tidegate_verdict`, one sentence that says what the updates waited for."""
        current = _Cumulative.of(self._attachment)
        passed, self._before = current.since(self._before), current
        return {
            f"{PREFIX}update_seconds": round(passed.update, 6),
            f"{PREFIX}stall_seconds": round(sum(seconds for _, seconds in passed.stalls), 6),
            VERDICT: verdict(passed.step_figures(self._attachment), self._optimizer.engine.effective),
        }


@dataclass(frozen=True)
class _Cumulative:
    """Sums since the run was attached: seconds of all steps, of updates and of stalls by cause, and statistics of how
    gradients arrived."""

    step: float = 0.0
    update: float = 0.0
    stalls: tuple[tuple[str, float], ...] = ()
    gradient_arrival: GradientArrival = field(default_factory=GradientArrival)

    @classmethod
    def of(cls, attachment: Attachment) -> _Cumulative:
        """Reads the present sums of an attachment."""
        recorder = attachment.recorder
        with recorder.lock:
            stalls = recorder.rows("tidegate_stall_seconds_total")
            phases = {phase: seconds for (phase,), seconds in recorder.seconds("tidegate_phase_seconds").items()}
            spill = sum(recorder.rows("tidegate_update_spill_seconds_total").values())
            gradient_arrival = recorder.totals.gradient_arrival
        by_cause = tuple((cause, seconds) for (phase, cause), seconds in stalls.items() if phase == "update")
        return cls(sum(phases.values()), phases.get("update", 0.0) + spill, by_cause, gradient_arrival)

    def since(self, before: _Cumulative) -> _Cumulative:
        """Differences between these sums and the earlier sums `before`."""
        earlier = dict(before.stalls)
        stalls = tuple((cause, seconds - earlier.get(cause, 0.0)) for cause, seconds in self.stalls)
        gradient_arrival = self.gradient_arrival - before.gradient_arrival
        return _Cumulative(self.step - before.step, self.update - before.update, stalls, gradient_arrival)

    def step_figures(self, attachment: Attachment) -> UpdateFigures:
        """Returns these sums in the form that the function `verdict` takes."""
        return UpdateFigures(
            step_seconds=self.step,
            update_seconds=self.update,
            stalls=dict(self.stalls),
            paths=attachment.recorder.path_names,
            recopied=self.gradient_arrival.recopied,
            first_gradient=self.gradient_arrival.first_gradient,
            together=self.gradient_arrival.single_node_share,
        )
