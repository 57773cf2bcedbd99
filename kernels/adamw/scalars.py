"""Scalars of an AdamW or Adam update, rounded once to fp32, and the arithmetics in which kernels use the scalars."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

from tidegate.kernels.arithmetic.formats import to_f32


class Arithmetic(IntEnum):
    """The rounding behaviour of an update; the formulas are the same. The numbers are those of
    kernels/src/kernels.h."""

    TORCH = 0
    """Each of + − × ÷ √ rounds once, in the order of `torch.optim.AdamW`."""
    DEEPSPEED = 1
    """Like the vector loop of DeepSpeed's cpu_adam (csrc/includes/cpu_adam.h, Step_AVX): a product and the sum after it
    are rounded together (fused multiply-add)."""
    DEEPSPEED_TAIL = 2
    """Like the scalar loop of DeepSpeed's cpu_adam for the elements after the last full vector of an array
    (csrc/adam/cpu_adam_impl.cpp, Step_1), as GCC compiles it. The fused multiply-add of a moment takes the product
    beta × old moment; with DEEPSPEED it takes the product (1 − beta) × gradient (or its square)."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Scalars of one AdamW or Adam update; each is exactly an fp32 value. Made by `scalars`."""

    grad_scale: float
    l2: float
    decay: float
    """Weight decay. With TORCH arithmetic: the factor by which the weight is multiplied. Otherwise: the share of the
    weight that is subtracted from it, 0 without weight decay or with `l2`."""
    beta1: float
    """The factor of the old exp_avg. Not used by TORCH, which adds (gradient − exp_avg) × (1 − beta1) to it."""
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    inverse_bias_correction2_sqrt: float
    eps: float
    arithmetic: Arithmetic = Arithmetic.TORCH

    def as_tuple(self) -> tuple[float, ...]:
        """The numeric scalars as a tuple, in the order of `SCALAR_NAMES`. It is faster than dataclasses.astuple, which
        takes 10 µs a call."""
        return (
            self.grad_scale,
            self.l2,
            self.decay,
            self.beta1,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.step_size,
            self.inverse_bias_correction2_sqrt,
            self.eps,
        )


SCALAR_NAMES = tuple(field.name for field in fields(Scalars) if field.name != "arithmetic")
"""Names of the numeric scalars, in the order of the kernels' parameters."""


def scalars(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> Scalars:
    """Scalars of update number `step` (from 1) with TORCH arithmetic, computed in double precision, then rounded once.

    `decoupled`: AdamW, where the weight decays by lr × weight_decay; otherwise Adam, where weight_decay × weight is
    added to the gradient. `grad_scale`: the gradient is first multiplied by it. It is the clip factor divided by the
    loss scale, negative to maximize.
    """
    if step < 1:
        raise ValueError(f"step is {step}, must be 1 or more: the first update is number 1")
    return Scalars(
        grad_scale=to_f32(grad_scale),
        l2=0.0 if decoupled else to_f32(weight_decay),
        decay=to_f32(1.0 - lr * weight_decay) if decoupled else 1.0,
        beta1=to_f32(beta1),
        one_minus_beta1=to_f32(1.0 - beta1),
        beta2=to_f32(beta2),
        one_minus_beta2=to_f32(1.0 - beta2),
        step_size=to_f32(lr / (1.0 - beta1**step)),
        inverse_bias_correction2_sqrt=to_f32((1.0 - beta2**step) ** -0.5),
        eps=to_f32(eps),
    )
