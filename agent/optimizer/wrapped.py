"""Finds the `tidegate.AdamW` inside an optimizer of a framework."""

from __future__ import annotations

from typing import Any, Protocol

from tidegate.agent.optimizer.adamw import AdamW
from tidegate.errors import ConfigError


class OptimizerWrapper(Protocol):
    """An optimizer of a framework (Accelerate, Lightning) that holds another one as `optimizer`."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""


def unwrapped(optimizer: Any, caller: str) -> AdamW:
    """The `tidegate.AdamW` inside an optimizer that was passed to the function `caller`. ConfigError when there is
    none."""
    inner = innermost(optimizer)
    if isinstance(inner, AdamW):
        return inner
    raise ConfigError(
        f"{caller}() was given an {type(inner).__name__} of {type(inner).__module__}: give it a tidegate.AdamW, or a "
        "wrapper that holds one as `optimizer`."
    )


def innermost(optimizer: Any) -> Any:
    """Returns the innermost optimizer. Wrappers of Accelerate, Lightning and others hold it in their attribute
    `optimizer`, DeepSpeed's in `tidegate`."""
    current = optimizer
    while not isinstance(current, AdamW):
        inner = getattr(current, "tidegate", None) or getattr(current, "optimizer", None)
        if inner is None:
            break
        current = inner
    return current
