"""Parameters that are divided among ranks (DTensor: FSDP2): each rank updates its own shard, and only norms meet.

A shard is an ordinary tensor in the memory of the DTensor. Whole parameters are their own only shard here, so that
nothing else has to tell the two apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from tidegate.errors import ParameterError

Groups = tuple[Any, ...]
"""Process groups whose ranks hold the other shards, one for each dimension of the mesh that divides."""


class Part(torch.nn.Parameter):
    """This rank's part of a parameter that somebody else divides, in the same memory as `data`: an ordinary tensor
    here. What comes as its gradient is reduced already.

    groups: process groups whose ranks have the other parts.
    tail: how many of its last elements are updated with `Scalars.of_tail`.
    """

    groups: Groups
    tail: int

    def __new__(cls, data: torch.Tensor, groups: Groups, tail: int = 0) -> Part:
        # `data.data` has a version of its own: else an edit of one part of a buffer would look like one of all.
        part: Part = torch.Tensor._make_subclass(cls, data.data, False)
        part.groups, part.tail = groups, tail
        return part


def tail_of(param: torch.Tensor) -> int:
    """How many of its last elements are updated apart from the others."""
    return param.tail if isinstance(param, Part) else 0


def is_divided(tensor: torch.Tensor | None) -> TypeGuard[Any]:
    """Whether it is a DTensor. Their module, which takes long to import, is there when one is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gradients_are_final(param: torch.Tensor) -> bool:
    """Whether a gradient is that of all ranks when it arrives, not this rank's summand of it."""
    return is_divided(param) or isinstance(param, Part)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the same memory; always the same object for the same tensor."""
    if not is_divided(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor
    return part


def as_part_of(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` as this rank's shard of something divided like `whole`; itself where that is not divided."""
    if not is_divided(whole):
        return part
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # As FSDP2 makes them: `from_local` would look at the part, which may be a stand-in without memory.
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    divided: torch.Tensor = type(whole)(
        part, DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta), requires_grad=False
    )
    return divided


def own_part(given: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of `given`, which has the shape of `whole`, that belongs to this rank's shard of `whole`.

    Where `given` is divided in another way, all ranks must ask at once.
    """
    if not is_divided(whole):
        return given.full_tensor() if is_divided(given) else given
    if is_divided(given):
        if given.device_mesh == whole.device_mesh and given.placements == whole.placements:
            return shard_of(given)
        given = given.full_tensor()
    from torch.distributed.tensor import distribute_tensor

    # Everyone has the whole of it: nothing needs to be sent.
    given = given.to(whole.device_mesh.device_type)
    return shard_of(distribute_tensor(given, whole.device_mesh, whole.placements, src_data_rank=None))


def check_divided_alike(index: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """ParameterError for a gradient that is not divided as its weight is: its shard is of other elements, or of sums
    that are not complete."""
    forms = [tuple(t.placements) if is_divided(t) else "not divided" for t in (grad, weight)]
    if forms[0] != forms[1]:
        raise ParameterError(
            f"The gradient of parameter {index} is {forms[0]} over the ranks, the parameter {forms[1]}. Redistribute "
            "it to the parameter's placements before step()."
        )


class Norm(Protocol):
    """How squares of gradients become those of all ranks: `NormOverRanks`, or a framework's own way to round."""

    def extend(self, params: Sequence[torch.Tensor]) -> None: ...

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]: ...


class NormOverRanks:
    """Adds up what the shards of all ranks have: squares of gradients, and how many of them are not finite.

    A collective, when any parameter is divided: all ranks call `total` in the same step, in the same order.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._groups: list[Groups] = []
        self._devices: dict[Groups, torch.device] = {}
        """With their number: a lane's thread has another current device."""
        self.extend(params)

    def extend(self, params: Sequence[torch.Tensor]) -> None:
        """More parameters, behind those that are known."""
        for param in params:
            groups = _groups_of(param)
            self._groups.append(groups)
            if groups:
                self._devices.setdefault(groups, shard_of(param).device)

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]:
        """Sum of squares over all elements of the parameters in `squares` (sum, bad elements) on all ranks, and whether
        the step is to be skipped: elements are bad, or any rank says so. Parameters in their order: a sum depends on
        it."""
        keys = dict.fromkeys(self._groups)
        sums = dict.fromkeys(keys, 0.0)
        bad = dict.fromkeys(keys, int(skip))
        for param in sorted(squares):
            square, count = squares[param]
            sums[self._groups[param]] += square
            bad[self._groups[param]] += count
        for groups, device in self._devices.items():
            both = torch.tensor([sums[groups], float(bad[groups])], dtype=torch.float64, device=device)
            for group in groups:
                dist.all_reduce(both, group=group)
            sums[groups], counted = both.tolist()
            bad[groups] = int(counted) if counted == counted else 1
        return sum(sums.values(), 0.0), any(bad.values())


def _groups_of(param: torch.Tensor) -> Groups:
    if isinstance(param, Part):
        return param.groups
    if not is_divided(param):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(dim) for dim, placed in enumerate(param.placements) if placed.is_shard() and mesh.size(dim) > 1
    )
