"""AdamW and Adam as DeepSpeed's cpu_adam rounds them. Native code and Triton kernel are those of the rule "adamw"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tidegate.kernels import adamw
from tidegate.kernels.adamw import native
from tidegate.kernels.adamw.scalars import Arithmetic, Scalars
from tidegate.kernels.arithmetic.implementation import Implementation, Piece
from tidegate.kernels.deepspeed_adamw import oracle
from tidegate.kernels.deepspeed_adamw.scalars import scalars
from tidegate.kernels.deepspeed_adamw.torch_step import step
from tidegate.rules.deepspeed_adamw import RULE


def pieces(param: torch.Tensor, offset: int, numel: int, values: Scalars) -> Iterator[Piece]:
    """Divides elements into those before and those in the tail of the parameter: the last `param.tail` elements, which
    do not fill a vector of cpu_adam and are rounded in another order."""
    tail = min(max(offset + numel - param.numel() + getattr(param, "tail", 0), 0), numel)
    if tail < numel:
        yield 0, numel - tail, values
    if tail:
        yield numel - tail, tail, of_tail(values)


def of_tail(values: Scalars) -> Scalars:
    """The scalars for the tail of a parameter."""
    return replace(values, arithmetic=Arithmetic.DEEPSPEED_TAIL)


_TRIAL = scalars(1e-3, (0.9, 0.999), 1e-8, 0.1, step=3, grad_scale=0.37)
_TRIAL_L2 = scalars(1e-3, (0.9, 0.999), 1e-8, 0.1, step=3, grad_scale=0.37, decoupled_weight_decay=False)

IMPLEMENTATION = Implementation(
    rule=RULE,
    scalars=scalars,
    step=step,
    native=native.update,
    task=native.task,
    triton=replace(
        adamw.TRITON,
        oracle=oracle.update,
        trials={"": _TRIAL, "tail, Adam's L2": of_tail(_TRIAL_L2), "Adam's L2": _TRIAL_L2, "tail": of_tail(_TRIAL)},
    ),
    pieces=pieces,
)
