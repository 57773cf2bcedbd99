"""Hooks on a model that mark the phases of a step: begin and end of a forward, begin of a backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tidegate.agent.optimizer.module_hooks import ModelHook
from tidegate.agent.optimizer.optimizer import Optimizer


class PhaseHooks:
    """Hooks on a model that tell its optimizer when a forward or backward begins, so that wall time is counted for the
    right phase. `on` registers them on a model."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def on(self, model: torch.nn.Module) -> list[Any]:
        """Registers the hooks and returns their handles."""
        return [
            # Registered before all other hooks, so that waits in other hooks count as forward.
            model.register_forward_pre_hook(ModelHook(self.before_forward), prepend=True),
            model.register_forward_hook(ModelHook(self.after_forward)),
        ]

    def before_forward(self, *_: Any) -> None:
        """Begins the phase `forward`, unless gradients are disabled (`torch.no_grad()`, as in an evaluation)."""
        if torch.is_grad_enabled():
            self._optimizer.phases.enter("forward")

    def after_forward(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Ends the phase `forward`. The phase `backward` begins when autograd computes the gradient of `output` (of its
        first tensor that requires a gradient)."""
        if self._optimizer.phases.current == "forward":
            self._optimizer.phases.enter("other")
            for tensor in _tensors(output):
                # The gradient of an output is computed first in a backward. The hook must not keep the optimizer alive
                # through a loss that is kept.
                tensor.register_hook(ModelHook(self._optimizer._backward_began))
                break


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a model's output that require gradients; dicts, tuples and lists are searched."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict):
        yield from (t for value in output.values() for t in _tensors(value))
    elif isinstance(output, (tuple, list)):
        yield from (t for value in output for t in _tensors(value))
