"""What goes along to a new engine when parameters are moved, converted, exchanged or put into other groups, and what
cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.state_dicts import MOMENTS, ParamState
from tidegate.errors import MemoryBudgetError, ParameterError

log = logging.getLogger("tidegate")


T = TypeVar("T")


class Regrouping:
    """Which of the parameters that are in the groups now were there before, and which number they had."""

    def __init__(self, params: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        known = {id(param): number for number, param in enumerate(before)}
        self._was = [known.get(id(param)) for param in params]
        self.removed = sorted({*known.values()} - {*self._was})
        """Numbers of those that left."""
        self.num_new = self._was.count(None)
        """How many were not there before."""

    @property
    def changes_nothing(self) -> bool:
        """The same parameters with the same numbers."""
        return not self.removed and self._was == list(range(len(self._was)))

    def renumbered(self, of_before: Mapping[int, T]) -> dict[int, T]:
        """What was known of parameters by their numbers, by the numbers that they have now."""
        return {now: of_before[was] for now, was in enumerate(self._was) if was is not None and was in of_before}

    def steps(self, before: Sequence[int]) -> list[int]:
        """How often each was updated: those that are new never."""
        return [0 if was is None else before[was] for was in self._was]


def check_can_follow(engine: Engine, has_state: bool, moved: str, reordered: bool) -> None:
    """ParameterError when something was done with `engine` that a new one could not go on with.

    has_state: of parameters that were updated, or whose state was loaded. moved: name of a parameter that was moved.
    reordered: some were exchanged for others, or have another shape or order in memory.
    """
    if engine.gradients.any_released or engine.gradients.any_set_aside:
        raise ParameterError(
            f"Parameter {moved} was moved or converted, or put into another param group, after a backward whose "
            "gradients were released already: they belong to where it was. Drop them with optimizer.zero_grad() and "
            "run the backward again."
        )
    if not has_state:
        return
    if engine.store is not None:
        raise ParameterError(
            f"There is a state that was loaded or trained, and parameter {moved} was moved or converted, or put into "
            "another param group; what lies on storage paths cannot go along. Load it after the model is where it "
            "stays; or take optimizer.state_dict() with the groups as they were, close() this optimizer, build another "
            "one and load the state there."
        )
    if reordered:
        raise ParameterError(
            f"A state was loaded, then parameter {moved} was replaced or given another shape: the state is of the old "
            "one. Load it after the model is as it stays."
        )


def warn_of_removed(regrouping: Regrouping, steps: Sequence[int]) -> None:
    """Parameters that leave the groups lose their state: whoever puts one back later is told now."""
    lost = [number for number in regrouping.removed if steps[number]]
    if lost:
        log.warning(
            "%d of %d parameters (from parameter %d on) are in no param group any more, and their state is dropped; "
            "new ones (%d) begin at step 0. To pause a parameter, leave it in its group with requires_grad=False or "
            "without a gradient.",
            len(lost), len(steps), lost[0], regrouping.num_new,
        )  # fmt: skip


def carried(engine: Engine, params: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[int, ParamState]:
    """The state that goes along: what makes a 16-bit weight an fp32 one only where the weight is bit for bit the same.

    MemoryBudgetError when host memory does not hold it beside what it is copied from.
    """
    updated = [shard.numel() for shard, step in zip(engine.shards, steps, strict=True) if step]
    needed, available = 12 * sum(updated), host_available_bytes()
    if needed > available:
        raise MemoryBudgetError(
            f"Parameters were moved, converted or regrouped while they had a state, and its {needed:,} bytes need a "
            f"second place in host memory to go along; {available:,} are available. Load the state after the model is "
            "where it stays; or save a checkpoint, build another optimizer and load it there.",
            needed, available,
        )  # fmt: skip
    kept = engine.weights.unchanged() if updated else set()
    return {
        i: {name: value for name, value in state.items() if i in kept or name in ("step", *MOMENTS)}
        for i, state in state_dicts.gather(engine, params, steps).items()
    }


def hand_over(old: Engine, new: Engine) -> None:
    """What was said about backward passes that are going on or to come."""
    new.gradients.accumulating = old.gradients.accumulating
    new.gradients_come_reduced = old.gradients_come_reduced
