"""Finds the `tidegate.AdamW` inside an optimizer of a framework."""

from __future__ import annotations

from typing import Any, Protocol

from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.errors import ConfigError


class OptimizerWrapper(Protocol):
    """Interface of a framework's wrapper (Accelerate, Lightning) that holds an optimizer in the attribute
    `optimizer`."""

    @property
    def optimizer(self) -> Any:
        """The optimizer that is wrapped."""


def unwrapped(optimizer: Any, caller: str) -> Optimizer:
    """Returns the `tidegate.AdamW` that is the given optimizer or is wrapped in it. Raises ConfigError if there is
    none.

    caller: name of the public function that was called with this optimizer, for the error's text.
    """
    inner = innermost(optimizer)
    if isinstance(inner, Optimizer):
        return inner
    raise ConfigError(
        f"{caller}() was given an {type(inner).__name__} of {type(inner).__module__}: give it a tidegate.AdamW, or a "
        "wrapper that holds one as `optimizer`."
    )


def innermost(optimizer: Any) -> Any:
    """Returns the innermost optimizer. Wrappers of Accelerate, Lightning and other frameworks hold the wrapped
    optimizer in the attribute `optimizer`; DeepSpeed's wrapper holds it in the attribute `tidegate`."""
    current = optimizer
    while not isinstance(current, Optimizer):
        inner = getattr(current, "tidegate", None) or getattr(current, "optimizer", None)
        if inner is None:
            break
        current = inner
    return current
