"""Lets the tuner move what is `auto`: asks the model with the live rates, applies what it proposes between steps."""

from __future__ import annotations

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.optimizer import AdamW
from tidegate.agent.telemetry.phases import StepPhases
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs import AUTO
from tidegate.model.choose import best
from tidegate.model.settled import Rank
from tidegate.model.tuner import MINIMUM_GAIN, Move, Tuner
from tidegate.model.what_if import predicted_seconds
from tidegate.plan.effective import Effective


class Tuning:
    """One per attachment. Driven by the training thread."""

    def __init__(self, optimizer: AdamW, recorder: Recorder) -> None:
        self.tuner = Tuner()
        self._optimizer, self._recorder = optimizer, recorder

    def observe(self, result: StepResult, phases: StepPhases) -> None:
        """An update is done."""
        began = next((span.start for span in phases.spans if span.phase == "update"), None)
        if began is not None and not result.skipped:
            ended = max((span.end for span in result.spans), default=began)
            self.tuner.observe(result.effective, max(ended, phases.spans[-1].start) - began)

    def between_steps(self) -> None:
        """Moves when the tuner says so."""
        optimizer = self._optimizer
        if not self.free:
            return
        wanted = self.tuner.propose(optimizer.engine.effective, self._look)
        if wanted is None:
            return
        try:
            optimizer.set_auto(stride=wanted.stride, alternate=wanted.alternate)
        except ConfigError as error:
            self.tuner.refuse(error)

    @property
    def free(self) -> frozenset[str]:
        """The knobs that the tuner may move here. The other baselines have no stride to choose."""
        if self._optimizer.offload.policy != "interleaved":
            return frozenset()
        knobs = self._optimizer.knobs
        auto = {name for name in ("stride", "order") if getattr(knobs, name) == AUTO}
        return frozenset(auto - ({"order"} if self._optimizer.engine.store is None else set()))

    def _look(self) -> Move | None:
        """What the model would choose now; None without rates, or when it would gain too little."""
        rates, last, now = self._recorder.rates, self._recorder.totals.last, self._optimizer.engine.effective
        if rates is None or last is None:
            return None
        engine = self._optimizer.engine
        capacity = engine.residences.capacity if engine.residences is not None else {}
        rank = Rank(engine.subgroups, engine.num_slots, engine.host_slots, engine.gradients.mode, capacity)
        backward = last.phase_seconds.get("backward", 0.0)
        try:
            present = predicted_seconds(rank, now, rates, backward_seconds=backward)
            found = best(
                rank,
                now,
                rates,
                self.free,
                below_seconds=(1 - MINIMUM_GAIN) * present,
                backward_seconds=backward,
                allowed=self._fits,
            )
        except ConfigError:
            return None  # a rate was not seen yet
        return None if found is None else Move(found[0], 1 - found[1] / present)

    def _fits(self, effective: Effective) -> bool:
        try:
            self._optimizer.engine.check(effective, self._optimizer.offload.headroom_bytes)
        except ConfigError:
            return False
        return True
