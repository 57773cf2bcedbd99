"""Divides param groups into subgroups: flat ranges of elements that are updated and copied as one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from pydantic import NonNegativeInt, PositiveInt

from tidegate.errors import ParameterError
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.plan.ops import Subgroup
from tidegate.rules.rule import StateTensor, UpdateRule


@dataclass(frozen=True)
class Format:
    """Storage format of weight and state for one dtype and one update rule. `aux` completes a 16-bit weight to fp32: a
    remainder or an fp32 master.

    The state of n elements is one block, in which each of `arrays` has n elements.
    """

    weight: WeightFormat
    grad: GradDtype
    rule: UpdateRule

    @property
    def arrays(self) -> tuple[StateTensor, ...]:
        """The rule's state tensors, then aux if there is one."""
        aux = REMAINDER if self.weight is WeightFormat.BF16_REMAINDER else MASTER
        return (*self.rule.tensors, *((aux,) if self.aux_bytes else ()))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each of `arrays`: the bytes per parameter of what stands before it in the block, and of the array itself.
        Arrays of larger elements stand first, so that each array is aligned."""
        order = sorted(self.arrays, key=lambda array: -array.nbytes)
        before = dict(zip(order, accumulate((array.nbytes for array in order), initial=0), strict=False))
        return tuple((before[array], array.nbytes) for array in self.arrays)

    @property
    def weight_bytes(self) -> int:
        return self.weight.weight_bytes

    @property
    def grad_bytes(self) -> int:
        return self.grad.nbytes

    @property
    def aux_bytes(self) -> int:
        return self.weight.aux_bytes

    @property
    def state_bytes(self) -> int:
        return self.rule.bytes_per_param + self.aux_bytes


REMAINDER, MASTER = AUX_ARRAYS = StateTensor("remainder", "int16"), StateTensor("master", "float32")
"""The arrays that complete a 16-bit weight to fp32, one or the other."""
AUX_NAMES = frozenset(array.name for array in AUX_ARRAYS)


GRAD_DTYPES: dict[torch.dtype, GradDtype] = {
    torch.float32: GradDtype.F32,
    torch.bfloat16: GradDtype.BF16,
    torch.float16: GradDtype.F16,
}
WEIGHT_FORMATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: WeightFormat.F32,
    torch.bfloat16: WeightFormat.BF16_REMAINDER,
    torch.float16: WeightFormat.F16_MASTER,
}


def grad_dtype_of(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: `grad_dtype` if it is set (fp32, for example, to accumulate micro-batches
    of bf16 weights in fp32), else the dtype of the parameter."""
    return getattr(param, "grad_dtype", None) or param.dtype


def format_of(param: torch.Tensor, rule: UpdateRule) -> Format:
    """The storage format for the dtype of a parameter and of its gradients."""
    return Format(WEIGHT_FORMATS[param.dtype], GRAD_DTYPES[grad_dtype_of(param)], rule)


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a parameter in a subgroup: `numel` elements from `offset` in the parameter, at `start` in the subgroup.

    `param` is the number of the parameter, counted through all groups in order.
    """

    param: NonNegativeInt
    offset: NonNegativeInt
    start: NonNegativeInt
    numel: PositiveInt


@dataclass(frozen=True)
class Layout:
    """Contents of one subgroup: parts of parameters of one param group, in one format."""

    id: int
    group: int
    format: Format
    segments: tuple[Segment, ...]

    @cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    def subgroup(self) -> Subgroup:
        """The subgroup as the planner needs it: sizes only."""
        fmt = self.format
        return Subgroup(self.id, self.numel, fmt.weight_bytes, fmt.grad_bytes, fmt.state_bytes)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of `tensor`, which must be dense, in the order of its storage."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def address_of(tensor: torch.Tensor) -> int:
    """Address of the first element of `tensor`, which must be dense, in the order of its storage."""
    return tensor.data_ptr()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element in the tensor's range of storage belongs to exactly one index: no gaps, no overlaps."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def check_param(param: torch.Tensor, index: int, rule: UpdateRule) -> None:
    """Raises ParameterError if this parameter cannot be offloaded, or cannot be updated by `rule`. index: number of the
    parameter."""
    if not rule.least_dims <= param.dim() <= rule.most_dims:
        raise ParameterError(
            f"Parameter {index} has {param.dim()} dimensions; the update rule {rule.name!r} takes {rule.least_dims} to "
            f"{rule.most_dims}: give the parameter to another optimizer."
        )
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_FORMATS)
    if param.dtype not in WEIGHT_FORMATS:
        is_double = param.dtype == torch.float64
        remedy = "convert the model with model.float()" if is_double else "give it to another optimizer"
        raise ParameterError(f"Parameter {index} has dtype {param.dtype}; supported are {known}: {remedy}.")
    if grad_dtype_of(param) not in GRAD_DTYPES:
        raise ParameterError(
            f"Parameter {index} has grad_dtype {grad_dtype_of(param)}; supported are {known}: set param.grad_dtype to "
            "one of them."
        )
    if param.layout != torch.strided:
        raise ParameterError(
            f"Parameter {index} is {param.layout}; only dense parameters are supported: convert it with to_dense(), or "
            "give it to another optimizer."
        )
    if not is_dense(param):
        raise ParameterError(
            f"Parameter {index} (shape {tuple(param.shape)}, strides {param.stride()}) has gaps in memory; "
            "make it contiguous before the optimizer is built."
        )
    if param.numel() and param.device.type != "meta" and not param.data_ptr():
        raise ParameterError(
            f"Parameter {index} is a {type(param.data).__name__}, which has no memory of its own (it wraps other "
            "tensors, or its storage was freed): give it to another optimizer."
        )


def check_distinct(params: Sequence[torch.Tensor]) -> None:
    """Raises ParameterError if a parameter is listed twice: it would be updated twice, or with half of its gradient."""
    if len({id(param) for param in params}) != len(params):
        raise ParameterError("A parameter is listed more than once in a param group: list each once.")


def make_subgroups(
    groups: Sequence[Sequence[torch.Tensor]], subgroup_numel: int, rule: UpdateRule
) -> tuple[Layout, ...]:
    """Subgroups of at most `subgroup_numel` elements, in order; each has parameters of one group and one format."""
    layouts: list[Layout] = []
    segments: list[Segment] = []
    key: tuple[int, Format] | None = None
    filled = 0

    def close() -> None:
        nonlocal segments, filled
        if segments and key is not None:
            layouts.append(Layout(len(layouts), key[0], key[1], tuple(segments)))
        segments, filled = [], 0

    index = 0
    for group, params in enumerate(groups):
        for param in params:
            if key != (group, format_of(param, rule)):
                close()
                key = (group, format_of(param, rule))
            offset = 0
            while offset < param.numel():
                take = min(param.numel() - offset, subgroup_numel - filled)
                segments.append(Segment(index, offset, filled, take))
                offset, filled = offset + take, filled + take
                if filled == subgroup_numel:
                    close()
            index += 1
    close()
    return tuple(layouts)


def shift_ids(layouts: Sequence[Layout], *, subgroups: int, groups: int, params: int) -> list[Layout]:
    """Returns copies of the layouts with other numbers: `subgroups` is added to the id of each subgroup, `groups` to
    the number of its param group, and `params` to the numbers of its parameters."""
    return [
        replace(layout, id=subgroups + layout.id, group=groups + layout.group, segments=tuple(
            replace(segment, param=params + segment.param) for segment in layout.segments
        ))
        for layout in layouts
    ]  # fmt: skip
