"""Ownership of parameters: each parameter belongs to one optimizer at most, and shares memory with no other. A new
optimizer takes over the parameters of optimizers that are not in the middle of a step."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tidegate.agent.parameters.shards import shard_of
from tidegate.agent.parameters.subgroups import check_param
from tidegate.errors import ParameterError
from tidegate.rules.rule import UpdateRule

log = logging.getLogger("tidegate")


class Owner(Protocol):
    """An optimizer that holds parameters."""

    @property
    def _is_mid_step(self) -> bool:
        """Whether closing this optimizer now would break a step or lose gradients."""

    @property
    def _is_of_this_process(self) -> bool:
        """False in a forked child that has inherited the optimizer."""

    @property
    def rule(self) -> UpdateRule:
        """The update rule."""

    def _close_for_new_owner(self) -> None:
        """Closes this optimizer because another one takes its parameters."""


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter → weak reference to the optimizer that holds it."""


def claim(owner: Owner, params: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> None:
    """Registers `owner` as the optimizer of `params`, until it is garbage-collected or releases them.

    beside: parameters that `owner` has already; they may be among `params`, too.

    Other optimizers that own some of `params` are garbage-collected if only reference cycles keep them alive; else they
    are closed, with a warning. Raises ParameterError, with nothing registered, for parameters that cannot be offloaded
    or share memory, and if another optimizer that owns some of `params` is in the middle of a step or belongs to a
    parent process.
    """
    for index, param in enumerate(params, start=len(beside)):
        check_param(shard_of(param), index, owner.rule)
    _check_separate([shard_of(param) for param in (*beside, *params)])
    if _held_by_others(owner, params):
        gc.collect()
        _close_others(_held_by_others(owner, params), first=len(beside))
    for param in params:
        _owners[param] = weakref.ref(owner)


def _held_by_others(owner: Owner, params: Sequence[torch.Tensor]) -> dict[int, weakref.ref[Owner]]:
    """The other existing optimizers that own some of `params`, as weak references by index in `params`."""
    owners: dict[int, weakref.ref[Owner]] = {}
    for index, param in enumerate(params):
        holder = _owners.get(param)
        other = None if holder is None else holder()
        if holder is not None and other is not None and other is not owner:
            owners[index] = holder
    return owners


def _close_others(held: dict[int, weakref.ref[Owner]], first: int) -> None:
    """Closes the optimizers in `held` (see `_held_by_others`), with a warning. Raises ParameterError, before any is
    closed, if one of them is in the middle of a step or belongs to a parent process.

    first: number of parameters that the new optimizer has already; in messages, parameters are counted from there.
    """
    others: dict[int, tuple[Owner, list[int]]] = {}
    for index, holder in held.items():
        other = holder()
        if other is not None:
            others.setdefault(id(other), (other, []))[1].append(index + first)
    for other, indices in others.values():
        if not other._is_of_this_process:
            raise ParameterError(
                f"Parameter {indices[0]} belongs to a Tidegate optimizer of the process that this one was forked "
                "from, whose hooks are still on it. Fork before the optimizer is built, or train a "
                "copy.deepcopy() of the model."
            )
        if other._is_mid_step:
            raise ParameterError(
                f"Parameter {indices[0]} belongs to another Tidegate optimizer, which is in the middle of a step. Let "
                "its step() end; or drop its gradients with its zero_grad() and close() it."
            )
    for other, indices in others.values():
        log.warning(
            "An earlier Tidegate optimizer is closed: %d of its parameters (from parameter %d on) belong to a new one "
            "now. Its state is not transferred: use state_dict() of the old one and load_state_dict() of the new one. "
            "To end an optimizer without this warning, call its close().",
            len(indices), indices[0],
        )  # fmt: skip
        try:
            other._close_for_new_owner()
        except Exception:
            log.exception("an earlier optimizer could not be closed completely")


def release_ownership(owner: Owner, params: Sequence[torch.Tensor]) -> None:
    """Removes the registration of those `params` that belong to `owner`."""
    for param in params:
        holder = _owners.get(param)
        if holder is not None and holder() is owner:
            del _owners[param]


def _check_separate(params: Sequence[torch.Tensor]) -> None:
    """Raises ParameterError if two parameters share memory: the update of each would undo the update of the other."""
    ranges = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), index)
        for index, param in enumerate(params)
        if param.numel()
    )
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise ParameterError(
                f"Parameters {min(first, second)} and {max(first, second)} share memory. Tie weights by giving both "
                "modules the same Parameter, which counts once; or give the optimizer one of the two."
            )
