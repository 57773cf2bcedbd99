"""Parameters that are divided among ranks (DTensor: FSDP2): each rank updates its own shard, and only norms are reduced
over ranks.

A shard is an ordinary tensor in the memory of the DTensor. A parameter that is not divided counts as its own single
shard here, so that other code need not distinguish the two.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from tidegate.errors import ParameterError

Groups = tuple[Any, ...]
"""Process groups whose ranks hold the other shards, one for each mesh dimension that divides the parameter."""


class LocalShard(torch.nn.Parameter):
    """This rank's shard of a parameter that another library (DeepSpeed) divides: an ordinary tensor in the same memory
    as `data`. Its gradients are reduced over ranks before they arrive.

    groups: process groups whose ranks have the other shards.
    tail: number of its last elements that do not fill a vector of DeepSpeed's CPU kernel. The update rule
        "deepspeed_adamw" reads it.
    subgroup: number of DeepSpeed's subgroup that it belongs to, on which the rounding of the gradient norm depends.
    """

    groups: Groups
    tail: int
    subgroup: int

    def __new__(cls, data: torch.Tensor, groups: Groups, tail: int, subgroup: int) -> LocalShard:
        # `data.data` has a version of its own: else an edit of one shard in a buffer would count as an edit of all.
        part: LocalShard = torch.Tensor._make_subclass(cls, data.data, False)
        part.groups, part.tail, part.subgroup = groups, tail, subgroup
        return part


def is_divided(tensor: torch.Tensor | None) -> TypeGuard[Any]:
    """Whether the tensor is a DTensor. Importing the DTensor module takes long, so it is not imported here: if no other
    code has imported it, there is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gradients_are_final(param: torch.Tensor) -> bool:
    """Whether gradients of this parameter are already reduced over ranks when they arrive. Otherwise each rank has a
    gradient of its own, which is a part of the sum."""
    return is_divided(param) or isinstance(param, LocalShard)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in the same memory (the tensor itself if it is not divided). The same object for the same
    tensor, until FSDP2 replaces the shard."""
    if not is_divided(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor
    return part


def wrap_like(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor that is divided like `whole`, with `part` as this rank's shard; `part` itself if `whole` is not
    divided."""
    if not is_divided(whole):
        return part
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # As FSDP2 does: `from_local` would read `part`, which may be a placeholder without memory.
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    divided: torch.Tensor = type(whole)(
        part, DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta), requires_grad=False
    )
    return divided


def local_part(given: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of `given` that belongs to this rank's shard of `whole`; both have the same full shape.

    If `given` is divided in another way, the ranks communicate: all of them must then call this at the same time.
    """
    if not is_divided(whole):
        return given.full_tensor() if is_divided(given) else given
    if is_divided(given):
        if given.device_mesh == whole.device_mesh and given.placements == whole.placements:
            return shard_of(given)
        given = given.full_tensor()
    from torch.distributed.tensor import distribute_tensor

    # Each rank has all of `given`: no communication is needed.
    given = given.to(whole.device_mesh.device_type)
    return shard_of(distribute_tensor(given, whole.device_mesh, whole.placements, src_data_rank=None))


def check_divided_alike(index: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Raises ParameterError if a gradient is divided among ranks in another way than its weight. The shard of such a
    gradient would hold other elements than the shard of the weight, or sums that are not complete. index: number of the
    parameter."""
    forms = [tuple(t.placements) if is_divided(t) else "not divided" for t in (grad, weight)]
    if forms[0] != forms[1]:
        raise ParameterError(
            f"The gradient of parameter {index} has placements {forms[0]}, but the parameter has {forms[1]}. "
            "Redistribute the gradient to the parameter's placements before step()."
        )


class GradientNorm(Protocol):
    """Interface of an object that sums squared gradients over ranks: `NormOverRanks`, or an implementation that rounds
    as another framework does."""

    def extend(self, params: Sequence[torch.Tensor]) -> None:
        """Adds `params` to the parameters whose gradients are summed."""

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]:
        """Returns the sum of squares over all ranks, and whether the step must be skipped: because elements are not
        finite, or because `skip` is true on any rank. squares: by parameter, the sum of squares and the number of
        non-finite elements on this rank."""


class NormOverRanks:
    """Sums the squares of gradient elements, and the numbers of elements that are not finite, over the shards of all
    ranks.

    `total` is a collective if any parameter is divided: all ranks call it in the same step, in the same order.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._groups: list[Groups] = []
        self._devices: dict[Groups, torch.device] = {}
        """Device of the all-reduce, by process groups. It includes the device's index, because the current device of a
        lane's thread may be another."""
        self.extend(params)

    def extend(self, params: Sequence[torch.Tensor]) -> None:
        """Adds `params` to the parameters whose gradients are summed."""
        for param in params:
            groups = _groups_of(param)
            self._groups.append(groups)
            if groups:
                self._devices.setdefault(groups, shard_of(param).device)

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]:
        """The sum of squares over the parameters in `squares` on all ranks, and whether the step must be skipped:
        because elements are not finite, or because `skip` is true on any rank.

        squares: by parameter, the sum of squares of this rank's shard and the number of elements that are not finite.
        They are added in the order of the parameters, on which the rounding depends.
        """
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
    if isinstance(param, LocalShard):
        return param.groups
    if not is_divided(param):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placed in enumerate(param.placements)
        if not placed.is_replicate() and mesh.size(dim) > 1
    )
