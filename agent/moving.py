"""What goes along to a new engine when the model is moved or converted before the first step, and what cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.agent import checkpoint
from tidegate.agent.checkpoint import MOMENTS, ParamState
from tidegate.agent.devices.pinned import host_available_bytes
from tidegate.agent.engine.engine import Engine
from tidegate.errors import MemoryBudgetError, ParameterError


def check_can_follow(engine: Engine, has_state: bool, moved: str, reordered: bool) -> None:
    """ParameterError when something was done with `engine` that a new one could not go on with.

    has_state: a state was loaded. moved: name of a parameter that was moved. reordered: parameters are others, or have
    another shape or order in memory.
    """
    if engine.gradients.any_released or engine.gradients.any_set_aside:
        raise ParameterError(
            f"Parameter {moved} was moved or converted after a backward whose gradients were released already: they "
            "belong to where it was. Drop them with optimizer.zero_grad() and run the backward again."
        )
    if not has_state:
        return
    if engine.store is not None:
        raise ParameterError(
            f"A state was loaded, then parameter {moved} was moved or converted; what lies on storage paths cannot go "
            "along. Load it after the model is where it stays."
        )
    if reordered:
        raise ParameterError(
            f"A state was loaded, then parameter {moved} was replaced or given another shape: the state is of the old "
            "one. Load it after the model is as it stays."
        )


def carried(engine: Engine, params: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[int, ParamState]:
    """The state that goes along: what makes a 16-bit weight an fp32 one only where the weight is bit for bit the same.

    MemoryBudgetError when host memory does not hold it beside what it is copied from.
    """
    updated = [shard.numel() for shard, step in zip(engine.shards, steps, strict=True) if step]
    needed, available = 12 * sum(updated), host_available_bytes()
    if needed > available:
        raise MemoryBudgetError(
            f"The model was moved or converted after its state was loaded, and the {needed:,} bytes of state need a "
            f"second place in host memory to go along; {available:,} are available. Load it after the model is where "
            "it stays.",
            needed, available,
        )  # fmt: skip
    kept = engine.weights.kept() if updated else set()
    return {
        i: {name: value for name, value in state.items() if i in kept or name in ("step", *MOMENTS)}
        for i, state in checkpoint.gather(engine, params, steps).items()
    }


def hand_over(old: Engine, new: Engine) -> None:
    """What was said about backward passes that are going on or to come."""
    new.gradients.accumulating = old.gradients.accumulating
    new.gradients_come_reduced = old.gradients_come_reduced
