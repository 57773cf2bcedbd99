"""Statistics of how gradients arrive in a step: the share that was copied to the host twice, the time of the first
gradient, and the share that a single node of the autograd graph produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.timeline.step_result import StepPhases, StepResult

MIN_PARAMS: Final = 8
"""Smallest number of parameters for which two figures are determined: the time of the first gradient, and the share of
the gradients that come from a single node of the autograd graph. With fewer parameters, these figures say little: the
first gradient may come at the end of an ordinary backward, too."""


@dataclass(frozen=True, slots=True)
class GradientArrival:
    """Figures about the arrival of gradients, of one step or summed over several steps."""

    copied_bytes: int = 0
    """Bytes of the gradients that were copied to the host, each gradient counted once."""
    recopied_bytes: int = 0
    """Bytes of the gradients that were copied to the host again, because they changed after their first copy."""
    backward_seconds: float = 0.0
    """Duration of the last backward pass of each step, without the time that the engine took in it."""
    first_seconds: float = 0.0
    """Part of `backward_seconds` before the first gradient."""
    single_node_bytes: float = 0.0
    """Bytes of the gradients that came from a single node of the autograd graph."""

    @property
    def single_node_share(self) -> float:
        """Share of the gradients that came from a single node of the autograd graph, and so arrived together at the end
        of its work."""
        return self.single_node_bytes / self.copied_bytes if self.copied_bytes else 0.0

    @property
    def recopied(self) -> float:
        """Share of the gradients, by bytes, that were copied to the host twice."""
        return self.recopied_bytes / self.copied_bytes if self.copied_bytes else 0.0

    @property
    def first_gradient(self) -> float:
        """Share of the time of the backward that passes before its first gradient; 0 if no gradient is copied to the
        host."""
        return self.first_seconds / self.backward_seconds if self.copied_bytes and self.backward_seconds else 0.0

    def __add__(self, other: GradientArrival) -> GradientArrival:
        return GradientArrival(
            self.copied_bytes + other.copied_bytes,
            self.recopied_bytes + other.recopied_bytes,
            self.backward_seconds + other.backward_seconds,
            self.first_seconds + other.first_seconds,
            self.single_node_bytes + other.single_node_bytes,
        )

    def __sub__(self, other: GradientArrival) -> GradientArrival:
        return GradientArrival(
            self.copied_bytes - other.copied_bytes,
            self.recopied_bytes - other.recopied_bytes,
            self.backward_seconds - other.backward_seconds,
            self.first_seconds - other.first_seconds,
            self.single_node_bytes - other.single_node_bytes,
        )


def gradient_arrival_of(
    result: StepResult, phases: StepPhases, copied_bytes: int, recopied_bytes: int
) -> GradientArrival:
    """Returns the figures about the arrival of gradients in one step. The numbers of bytes are as in
    `GradientArrival`."""
    if len(result.stepped) < MIN_PARAMS:
        return GradientArrival(copied_bytes, recopied_bytes)
    single_node_bytes = phases.single_node_share * copied_bytes
    return GradientArrival(copied_bytes, recopied_bytes, *_first_of_backward(phases), single_node_bytes)


def _first_of_backward(phases: StepPhases) -> tuple[float, float]:
    """Returns two durations of the last backward that made gradients, in seconds on the host's clock: its length
    without the time in the engine's hooks, and the time from its start to its first gradient. Both are 0 if the model
    is not attached, because the phase `backward` then begins with the first gradient."""
    moment = phases.first_gradient
    backwards = [span for span in phases.spans if span.phase == "backward"]
    last = next((span for span in backwards if moment is not None and span.start < moment <= span.end), None)
    if moment is None or last is None:
        return 0.0, 0.0
    in_hooks = phases.exposed_seconds.get("backward", 0.0) / len(backwards)
    return max(last.end - last.start - in_hooks, moment - last.start), moment - last.start
