"""What the folder of an update rule offers (`kernels/NAME/__init__.py`, as `IMPLEMENTATION`): how the rule computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tidegate.kernels import ThreadPool
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.arithmetic.oracle import Array
from tidegate.kernels.arithmetic.torch_kernels import TorchKernels, TorchStep
from tidegate.kernels.dispatch import GradientFactor, Task, TransferTask
from tidegate.rules.rule import UpdateRule

Piece = tuple[int, int, Any]
"""Part of a parameter that is updated with the same scalars: first element, number of elements, scalars."""


def whole(param: torch.Tensor, offset: int, numel: int, scalars: Any) -> Iterable[Piece]:
    """One piece for all elements."""
    return ((0, numel, scalars),)


@dataclass(frozen=True, kw_only=True)
class TritonUpdate:
    """The Triton kernel of a rule, and what shows that it works.

    module: name of a module with the functions of `GpuKernels`. It is imported where there is a GPU.
    oracle: the reference implementation: `oracle(weight, weight_format, aux, tensors, grad, grad_dtype, scalars)`.
    trial_state: makes the arrays of a test state from random fp32 numbers.
    trials: scalars of test updates, by the words that name them. Together they should reach each branch of the kernel.
    """

    module: str
    oracle: Callable[..., None]
    trial_state: Callable[[Array], Sequence[Array]]
    trials: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Implementation:
    """How an update rule computes. Only `rule`, `scalars` and `step` are needed.

    rule: the rule's data.
    scalars: makes the numbers of one update: `scalars(step=…, grad_scale=…, **hyperparameters)`. `step` counts updates
        from 1; `grad_scale` is a factor for the gradient, negative to maximize. Equal numbers must be equal objects.
    step: the arithmetic in torch operations.
    native: updates the elements of a run on host threads; None if `step` does it.
    task: makes the update of runs a task that needs no interpreter: `task(pool, runs, factor, flush)`. The scalars of
        the runs are made for a `grad_scale` of 1 or -1; `factor` is multiplied when the task runs. `flush`: the task
        that then writes the state to a file, for which the update makes the checksums; None for none. `task` is None if
        the rule has no native update.
    triton: the update on GPUs; None if `step` does it.
    pieces: divides elements of a parameter into parts that are updated with other scalars.
        `pieces(param, offset, numel, scalars)`: the `numel` elements from `offset` on of the tensor `param`; the first
        elements of the pieces are counted from `offset`.
    """

    rule: UpdateRule
    scalars: Callable[..., Any]
    step: TorchStep
    native: Callable[[ThreadPool, Update], None] | None = None
    task: Callable[[ThreadPool, Sequence[Update], GradientFactor, TransferTask | None], Task] | None = None
    triton: TritonUpdate | None = None
    pieces: Callable[[torch.Tensor, int, int, Any], Iterable[Piece]] = whole

    def in_torch(self, device_type: str) -> TorchKernels:
        """The update in torch operations, on "cuda" or "cpu"."""
        return TorchKernels(self.step, tuple(getattr(torch, one.dtype) for one in self.rule.tensors), device_type)

    @cached_property
    def update(self) -> Callable[[ThreadPool, Update], None]:
        """Updates the elements of a run in host memory."""
        kernels = self.in_torch("cpu")
        return self.native or (lambda _, run: kernels.update([run]))
