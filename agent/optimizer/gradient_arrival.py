"""How gradients came in a step: how much of them was copied to the host twice, how late the first one was there, and
how many of them one node of autograd's graph handed over."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.plan.ops import OpKind

FEW: Final = 8
"""With fewer parameters, the first gradient of an ordinary backward may come at its end, too."""
NODES: Final = 16
"""How many nodes of a graph are looked at: one that has the whole model is among the first of its backward."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Of one step, or of several together. Bytes of gradients that went to the host, each once, and those that went
    again, and those that one node of the graph handed over together; seconds of backward passes, without what the
    engine did in them, and how many of these had passed when the first gradient came."""

    copied_bytes: int = 0
    recopied_bytes: int = 0
    backward_seconds: float = 0.0
    first_seconds: float = 0.0
    together_bytes: float = 0.0

    @property
    def together(self) -> float:
        """Share of the gradients that one node of the graph handed over when all its work was done."""
        return self.together_bytes / self.copied_bytes if self.copied_bytes else 0.0

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
            self.together_bytes + other.together_bytes,
        )

    def __sub__(self, other: Delivery) -> Delivery:
        return Delivery(
            self.copied_bytes - other.copied_bytes,
            self.recopied_bytes - other.recopied_bytes,
            self.backward_seconds - other.backward_seconds,
            self.first_seconds - other.first_seconds,
            self.together_bytes - other.together_bytes,
        )


def delivery_of(result: StepResult, phases: StepPhases) -> Delivery:
    copied: dict[int, int] = {}
    again = 0
    for span in result.spans[result.num_dropped :]:
        if span.kind is OpKind.GRAD_D2H:
            again += span.nbytes if span.op in copied else 0
            copied[span.op] = span.nbytes
    total = sum(copied.values())
    if len(result.stepped) < FEW:
        return Delivery(total, again)
    return Delivery(total, again, *_first_of_backward(phases), phases.handed_together * total)


def handed_together(node: Any, params: Collection[Any]) -> float:
    """Share of the elements of these parameters whose gradients one node of the graph hands over together, of the nodes
    that a backward comes to first from `node`. Those of a compiled region do: `torch.compile` makes one node of it.

    Times would not tell: beside a brief backward, or one that the host only enqueues, hooks between two gradients of
    the same node take longer than the work before the first.
    """
    nodes, most = [node], 0
    for node in itertools.islice(nodes, NODES):
        inputs = [one for one, _ in node.next_functions if one is not None]
        leaves = {id(one.variable) for one in inputs if _is_leaf(one)}
        if len(leaves) >= FEW:
            most = max(most, sum(p.numel() for p in params if id(p) in leaves))
        nodes += [one for one in inputs if not _is_leaf(one)]
    return most / sum(p.numel() for p in params) if most else 0.0


def _is_leaf(node: Any) -> bool:
    """Whether the node adds a gradient to that of a parameter."""
    return type(node).__name__ == "AccumulateGrad"


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
