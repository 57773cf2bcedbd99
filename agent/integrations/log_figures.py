"""Computes Tidegate's figures for the entries of a framework's log: the seconds of updates and of stalls since the last
entry, and a verdict, which is one sentence that says what the updates waited for."""

from __future__ import annotations

from typing import Any, Final

from tidegate.agent.control.attachment import Attachment
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.telemetry.metric_store import Labels
from tidegate.timeline.gradient_arrival import GradientArrival
from tidegate.timeline.verdict import UpdateFigures, verdict

PREFIX: Final = "tidegate_"
"""Prefix of the names of Tidegate's figures in a framework's log."""
VERDICT: Final = f"{PREFIX}verdict"
"""Name of the verdict in a framework's log. It is the only value that is a sentence."""


class LogFigures:
    """Computes the figures of one attached optimizer for a framework's log: seconds of updates and of stalls, and a
    verdict on what the updates waited for."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        self._recorder, self._optimizer = attachment.recorder, optimizer
        self._before: dict[str, dict[Labels, float]] = {}
        self._arrival_before = GradientArrival()

    def since_last(self) -> dict[str, Any]:
        """Figures since the last call: `tidegate_update_seconds` and `tidegate_stall_seconds`, summed over the steps,
        and `tidegate_verdict`, one sentence that says what the updates waited for."""
        recorder = self._recorder
        with recorder.lock:
            phases = self._passed("phases", recorder.seconds("tidegate_phase_seconds"))
            stalls = self._passed("stalls", recorder.rows("tidegate_stall_seconds_total"))
            spill = self._passed("spill", recorder.rows("tidegate_update_spill_seconds_total"))
            arrival = recorder.totals.gradient_arrival
        update = phases.get(("update",), 0.0) + sum(spill.values())
        waits = {cause: seconds for (phase, cause), seconds in stalls.items() if phase == "update"}
        passed, self._arrival_before = arrival - self._arrival_before, arrival
        figures = UpdateFigures(
            step_seconds=sum(phases.values()),
            update_seconds=update,
            stalls=waits,
            paths=recorder.path_names,
            recopied=passed.recopied,
            first_gradient=passed.first_gradient,
            together=passed.single_node_share,
        )
        return {
            f"{PREFIX}update_seconds": round(update, 6),
            f"{PREFIX}stall_seconds": round(sum(waits.values()), 6),
            VERDICT: verdict(figures, self._optimizer.engine.effective),
        }

    def _passed(self, name: str, sums: dict[Labels, float]) -> dict[Labels, float]:
        """What has been added to each of these sums since the last call with this name."""
        before, self._before[name] = self._before.get(name, {}), sums
        return {labels: value - before.get(labels, 0.0) for labels, value in sums.items()}
