"""Which optimizer a parameter belongs to: one, and its memory is nobody else's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tidegate.agent.shards import shard_of
from tidegate.agent.subgroups import check_param
from tidegate.errors import ParameterError

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter → weak reference to the optimizer that holds it."""


def claim(owner: object, params: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> None:
    """`params` belong to `owner`, `beside` those that it has already, until it is collected or gives them up.

    ParameterError, with nothing claimed, for parameters that cannot be offloaded, share memory or belong to another.
    What `owner` has already it may claim again.
    """
    for index, param in enumerate(params, start=len(beside)):
        check_param(shard_of(param), index)
    _check_separate([shard_of(param) for param in (*beside, *params)])
    for index, param in enumerate(params, start=len(beside)):
        holder = _owners.get(param)
        if holder is not None and holder() not in (None, owner):
            raise ParameterError(
                f"Parameter {index} (shape {tuple(param.shape)}) already belongs to another Tidegate optimizer; "
                "close() that one first."
            )
    for param in params:
        _owners[param] = weakref.ref(owner)


def give_up(owner: object, params: Sequence[torch.Tensor]) -> None:
    """`params` that belong to `owner` are free for another."""
    for param in params:
        holder = _owners.get(param)
        if holder is not None and holder() is owner:
            del _owners[param]


def _check_separate(params: Sequence[torch.Tensor]) -> None:
    """Each of two that share memory would undo the other's update."""
    ranges = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), index)
        for index, param in enumerate(params)
        if param.numel()
    )
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            raise ParameterError(
                f"Parameters {min(one, other)} and {max(one, other)} share memory. Tie weights by giving both modules "
                "the same Parameter, which counts once; or give the optimizer one of the two."
            )
