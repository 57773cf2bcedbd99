"""Lets one `step()` of an optimizer run at a time."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.errors import EngineError

Closure = Callable[[], float]
"""Function that re-evaluates the model and returns the loss, as in `torch.optim.Optimizer.step`."""


class StepGuard:
    """Runs the steps of one optimizer, and refuses a step while another one runs."""

    def __init__(self) -> None:
        self._running: dict[str, object] = {}
        """The call of `step()` that is running, if any, under the key "call". A lock could stay locked for ever if a
        signal handler raises just after it was taken; the entry of a dictionary is removed then, too."""

    @property
    def is_stepping(self) -> bool:
        """Whether a step is running."""
        return bool(self._running)

    def run(self, step: Callable[[Closure | None], float | None], closure: Closure | None) -> float | None:
        """Calls `step(closure)` and returns its result. Raises EngineError if another step is running."""
        call = object()
        try:
            if self._running.setdefault("call", call) is not call:
                raise EngineError(
                    "step() of this optimizer is running already, in another thread or around this call. Call it from "
                    "one thread at a time: take a lock around backward() and step(), or give each thread an optimizer."
                )
            return step(closure)
        finally:
            # Without a call of a function, after which a signal handler could raise and leave the guard taken.
            if self._running == {"call": call}:
                del self._running["call"]
