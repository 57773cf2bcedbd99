"""Transfer of optimizer state to a new engine when parameters are moved, converted, replaced or put into other
groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.state_dicts import ParamState
from tidegate.agent.parameters.subgroups import AUX_NAMES, MASTER
from tidegate.errors import MemoryBudgetError, ParameterError

log = logging.getLogger("tidegate")


T = TypeVar("T")


class ParameterMapping:
    """Maps each present parameter to the number that it had before the param groups were changed."""

    def __init__(self, params: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        known = {id(param): number for number, param in enumerate(before)}
        self._was = [known.get(id(param)) for param in params]
        self.removed = sorted({*known.values()} - {*self._was})
        """Old numbers of the parameters that were removed."""
        self.num_new = self._was.count(None)
        """Number of parameters that are new."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the parameters and their numbers are the same as before."""
        return not self.removed and self._was == list(range(len(self._was)))

    def remap(self, by_old_number: Mapping[int, T]) -> dict[int, T]:
        """Converts a dictionary with old parameter numbers as keys to one with new numbers. Removed parameters are left
        out."""
        return {
            now: by_old_number[was] for now, was in enumerate(self._was) if was is not None and was in by_old_number
        }

    def steps(self, before: Sequence[int]) -> list[int]:
        """Number of updates of each present parameter, 0 for new ones. `before`: number of updates by old parameter
        number."""
        return [0 if was is None else before[was] for was in self._was]


def check_transferable(engine: Engine, has_state: bool, moved: str, reordered: bool) -> None:
    """Raises ParameterError if gradients or state of `engine` cannot be transferred to a new engine.

    has_state: whether parameters were updated or a state was loaded. moved: name of a parameter that was moved.
    reordered: whether parameters were replaced by others, or have another shape or order in memory.
    """
    if engine.gradients.any_released or engine.gradients.params_with_sums:
        raise ParameterError(
            f"Parameter {moved} was moved or converted, or put into another param group, after a backward whose "
            "gradients were released already: these belong to the parameter as it was before. Drop them with "
            "optimizer.zero_grad() and run the backward again."
        )
    if not has_state:
        return
    if engine.store is not None:
        raise ParameterError(
            f"There is a state that was loaded or trained, and parameter {moved} was moved or converted, or put into "
            "another param group; state on storage paths cannot be transferred. Load the state after the last change "
            "of the model; or take optimizer.state_dict() with the previous groups, close() this optimizer, build "
            "another one and load the state there."
        )
    if reordered:
        raise ParameterError(
            f"A state was loaded, then parameter {moved} was replaced or given another shape: the state belongs to "
            "the old one. Load the state after the last change of the model."
        )


def warn_of_removed(mapping: ParameterMapping, steps: Sequence[int]) -> None:
    """Logs a warning if removed parameters had state, which is lost now. Users may expect that the state is kept until
    they add the parameters again.

    steps: number of updates of each parameter, by old number.
    """
    lost = [number for number in mapping.removed if steps[number]]
    if lost:
        log.warning(
            "%d of %d parameters (from parameter %d on) are no longer in a param group, and their state is dropped; "
            "new ones (%d) begin at step 0. To pause a parameter, leave it in its group with requires_grad=False or "
            "without a gradient.",
            len(lost), len(steps), lost[0], mapping.num_new,
        )  # fmt: skip


def gather_for_transfer(engine: Engine, params: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[int, ParamState]:
    """A copy of the state for the new engine: step and tensors of the update rule, and `remainder` or
    `master` of 16-bit weights only where the weight has the same bits as after the last update.

    Raises MemoryBudgetError if host memory is too small for the copy and the original at the same time.
    """
    updated = [shard.numel() for shard, step in zip(engine.shards, steps, strict=True) if step]
    needed, available = (engine.rule.bytes_per_param + MASTER.nbytes) * sum(updated), host_available_bytes()
    if needed > available:
        raise MemoryBudgetError(
            f"Parameters were moved, converted or regrouped while they had a state. To transfer it, {needed:,} bytes "
            f"of host memory are needed for a copy, {available:,} bytes are available. Load the state after the last "
            "change of the model; or save a checkpoint, build another optimizer and load the checkpoint there.",
            needed, available,
        )  # fmt: skip
    unchanged = engine.weights.unchanged() if updated else set()
    return {
        i: {name: value for name, value in state.items() if i in unchanged or name not in AUX_NAMES}
        for i, state in state_dicts.gather(engine, params, steps).items()
    }
