"""Queue of step results for observers (functions that are called after each update): pairs the result of each update
with the phases of its step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.errors import EngineError
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import PhaseSpan

Observer = Callable[[StepResult, StepPhases], None]


class StepResultQueue:
    """Pairs the results of updates with the phases of their steps, in the order of the steps. The phases of a step end
    with `step()`; its update may end later."""

    def __init__(self, engine: Engine, phases: PhaseRecorder) -> None:
        self.observers: list[Observer] = []
        self.engine = engine
        """The present engine of the optimizer."""
        self._phases = phases
        self._results: deque[StepResult] = deque()
        self._ended_phases: deque[StepPhases] = deque()
        self._logged: dict[str, float] = {}
        self._waiting = threading.Lock()
        self._busy_threads: set[int] = set()
        """Threads that are in `run_update` or `wait_for_update`."""

    def log(self, loss: float | None, tokens: int | None) -> None:
        """Stores loss and number of tokens for the result of the next step. If it is called several times in one step,
        the tokens are added and the last loss is used."""
        if loss is not None:
            self._logged["loss"] = float(loss)
        if tokens is not None:
            self._logged["tokens"] = self._logged.get("tokens", 0) + int(tokens)

    def wait_for_update(self) -> None:
        """Waits for the running update, if there is one, and queues its result. Later, `deliver` passes the result to
        the observers, in the training thread.

        Gradient hooks of several threads may call this at the same time. Ctrl-C is delayed, so that the result is not
        lost. Raises EngineError if this thread updates or waits already: then a signal handler has called it.
        """
        with DelayInterrupt(), self._not_nested(), self._waiting:
            began = time.monotonic()
            result = self.engine.wait_for_update()
            if result is not None:
                self._phases.waited_for_update(began, time.monotonic())
                self._results.append(result)

    def run_update(self, update: Callable[[], None]) -> None:
        """Calls `update`, which begins an update and counts its step. In between, the state and the step counts do not
        match: if a signal handler waits for the update then, for example to save a checkpoint, it gets an
        EngineError."""
        with self._not_nested():
            update()

    @contextmanager
    def _not_nested(self) -> Iterator[None]:
        """Context manager: raises EngineError if this thread is in such a block already, which a signal handler has
        interrupted."""
        me = threading.get_ident()
        if me in self._busy_threads:
            raise EngineError(
                "The optimizer was called while it updates the weights, in the same thread, for example by a signal "
                "handler that saves a checkpoint. Let the handler set a flag, and save after step()."
            )
        try:
            self._busy_threads.add(me)  # a signal handler may raise after it
            yield
        finally:
            self._busy_threads.discard(me)

    def wait_for_step(self) -> None:
        """Waits for the running update, except for its deferred flushes. If it has none, its result is queued. To be
        called within `run_update`."""
        with DelayInterrupt(), self._waiting:
            result = self.engine.wait_for_step()
            if result is not None:
                self._results.append(result)

    def end_step(self) -> None:
        """Ends the phases of a step, and queues them."""
        self._ended_phases.append(replace(self._phases.end_step(), logged=self._logged))
        self._logged = {}

    def deliver(self, *, background: bool) -> None:
        """Calls the observers for each step whose update has ended, with the result and the phases of the step.

        background: whether an update may have continued during the phases of the next step. If so, the phases of the
        last step get these phases as `StepPhases.tail`.
        """
        while self._results and self._ended_phases:
            result, phases = self._results.popleft(), self._ended_phases.popleft()
            if background and not self._ended_phases:
                phases = replace(phases, tail=self._phases.so_far())
            for observe in tuple(self.observers):
                observe(result, phases)

    def phases_so_far(self) -> tuple[PhaseSpan, ...]:
        """Phases of the steps that were not yet reported to the functions in `observers`, including the current phase
        up to now. May be called from any thread."""
        ended = tuple(self._ended_phases)
        return (*(span for step in ended for span in step.spans), *self._phases.so_far())

    def forget(self) -> None:
        """Discards results and phases that are not delivered yet, because another state was loaded."""
        self._results.clear()
        self._ended_phases.clear()
