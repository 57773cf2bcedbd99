"""How gradients came in a step: how much of them was copied to the host twice, and how late the first one was there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.telemetry.phases import StepPhases
from tidegate.plan.ops import OpKind

FEW: Final = 8
"""With fewer parameters, the first gradient of an ordinary backward may come at its end, too."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Of one step, or of several together. Bytes of gradients that went to the host, each once, and those that went
    again; seconds of backward passes, without what the engine did in them, and how many of these had passed when the
    first gradient came."""

    copied_bytes: int = 0
    recopied_bytes: int = 0
    backward_seconds: float = 0.0
    first_seconds: float = 0.0

    @property
    def recopied(self) -> float:
        """Share of the gradients that were copied twice."""
        return self.recopied_bytes / self.copied_bytes if self.copied_bytes else 0.0

    @property
    def first_gradient(self) -> float:
        """Share of the backward that had passed when its first gradient came; 0 where nothing goes to the host."""
        return self.first_seconds / self.backward_seconds if self.copied_bytes and self.backward_seconds else 0.0

    def __add__(self, other: Delivery) -> Delivery:
        return Delivery(
            self.copied_bytes + other.copied_bytes,
            self.recopied_bytes + other.recopied_bytes,
            self.backward_seconds + other.backward_seconds,
            self.first_seconds + other.first_seconds,
        )

    def __sub__(self, other: Delivery) -> Delivery:
        return Delivery(
            self.copied_bytes - other.copied_bytes,
            self.recopied_bytes - other.recopied_bytes,
            self.backward_seconds - other.backward_seconds,
            self.first_seconds - other.first_seconds,
        )


def delivery_of(result: StepResult, phases: StepPhases) -> Delivery:
    copied: dict[int, int] = {}
    again = 0
    for span in result.spans[result.num_dropped :]:
        if span.kind is OpKind.GRAD_D2H:
            again += span.nbytes if span.op in copied else 0
            copied[span.op] = span.nbytes
    seconds, first = _first_of_backward(phases) if len(result.stepped) >= FEW else (0.0, 0.0)
    return Delivery(sum(copied.values()), again, seconds, first)


def _first_of_backward(phases: StepPhases) -> tuple[float, float]:
    """Of the last backward that made gradients: its seconds, and those before its first gradient, by the clock of the
    thread that runs it. Zeros where the model is not attached: the phase then begins with the first gradient."""
    moment = phases.first_gradient
    backwards = [span for span in phases.spans if span.phase == "backward"]
    last = next((one for one in backwards if moment is not None and one.start < moment <= one.end), None)
    if moment is None or last is None:
        return 0.0, 0.0
    in_hooks = phases.exposed_seconds.get("backward", 0.0) / len(backwards)
    return max(last.end - last.start - in_hooks, moment - last.start), moment - last.start
