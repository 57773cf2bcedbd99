"""AdamW and Adam with the arithmetic of `torch.optim.AdamW`. The rule "deepspeed_adamw" shares the native code and the
Triton kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tidegate.kernels.adamw import native, oracle
from tidegate.kernels.adamw.scalars import Scalars, scalars
from tidegate.kernels.adamw.torch_step import step
from tidegate.kernels.arithmetic.implementation import Implementation, TritonUpdate
from tidegate.kernels.arithmetic.oracle import Array
from tidegate.rules.adamw import RULE

_TRIAL = partial(scalars, 1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37)


def group_scalars(betas: tuple[float, float], decoupled_weight_decay: bool, **others: Any) -> Scalars:
    """`scalars` with the names of param groups."""
    return scalars(beta1=betas[0], beta2=betas[1], decoupled=decoupled_weight_decay, **others)


def trial_state(numbers: Array) -> tuple[Array, Array]:
    """Both moments: where the first is small, the second is denormal."""
    return numbers, np.square(numbers)


TRITON = TritonUpdate(
    module="tidegate.kernels.adamw.triton_adamw",
    oracle=oracle.update,
    trial_state=trial_state,
    trials={"": _TRIAL(), "Adam's L2": _TRIAL(decoupled=False)},
)
IMPLEMENTATION = Implementation(
    rule=RULE, scalars=group_scalars, step=step, native=native.update, task=native.task, triton=TRITON
)
