"""What steps came to, until observers hear of it: results of updates, and the phases of the steps they belong to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tidegate.agent.engine.engine import Engine, StepResult
from tidegate.agent.engine.interrupts import DelayInterrupt
from tidegate.agent.engine.phases import PhaseRecorder, StepPhases
from tidegate.timeline.timeline import PhaseSpan

Observer = Callable[[StepResult, StepPhases], None]


class Outcomes:
    """A step's phases end with `step()`, its update may end later: the two meet here, in the order of the steps."""

    def __init__(self, engine: Engine, phases: PhaseRecorder) -> None:
        self.observers: list[Observer] = []
        self.engine = engine
        """Whose updates they are now."""
        self._phases = phases
        self._results: deque[StepResult] = deque()
        self._cuts: deque[StepPhases] = deque()
        self._logged: dict[str, float] = {}
        self._settling = threading.Lock()

    def log(self, loss: float | None, tokens: int | None) -> None:
        """Of the step that comes next; tokens add up."""
        if loss is not None:
            self._logged["loss"] = float(loss)
        if tokens is not None:
            self._logged["tokens"] = self._logged.get("tokens", 0) + int(tokens)

    def settle(self) -> None:
        """Waits for the update that goes on; observers hear of it later, in the training thread.

        Gradient hooks of several threads may come here at once, and a Ctrl-C must not lose the result.
        """
        with DelayInterrupt(), self._settling:
            result = self.engine.wait_for_update()
            if result is not None:
                self._results.append(result)

    def end_step(self) -> None:
        """The phases since the last end are those of a step."""
        self._cuts.append(replace(self._phases.end_step(), logged=self._logged))
        self._logged = {}

    def deliver(self, *, background: bool) -> None:
        """Tells observers of the steps that are settled. background: updates go on in phases of the next step."""
        while self._results and self._cuts:
            result, phases = self._results.popleft(), self._cuts.popleft()
            if background and not self._cuts:
                phases = replace(phases, tail=self._phases.so_far())
            for observe in tuple(self.observers):
                observe(result, phases)

    def phases_so_far(self) -> tuple[PhaseSpan, ...]:
        """Phases of the steps that observers have not heard of, the present one as far as it got. From any thread."""
        ended = tuple(self._cuts)
        return (*(span for step in ended for span in step.spans), *self._phases.so_far())

    def forget(self) -> None:
        """Another state was loaded: nobody hears of what was before."""
        self._results.clear()
        self._cuts.clear()
