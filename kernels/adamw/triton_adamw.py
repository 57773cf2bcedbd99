"""The update of AdamW on a GPU, in Triton, for all of its arithmetics: equal to the oracles bit for bit."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from tidegate.kernels.adamw.scalars import Arithmetic
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.arithmetic.triton_kernels import EXACT, at, load_gradient, load_weight, store_weight
from tidegate.kernels.arithmetic.triton_kernels import sum_of_squares as sum_of_squares

TORCH, DEEPSPEED, DEEPSPEED_TAIL = (tl.constexpr(int(arithmetic)) for arithmetic in Arithmetic)
ELEMENTS_PER_PROGRAM = 1024
UPDATE_WARPS = 8
"""Warps of an update program, with four elements per thread: 16-byte loads of 32-bit arrays, 8-byte loads of 16-bit
arrays. With eight elements per thread some variants spill registers (`bench/triton_registers.py`)."""


def update(runs: Sequence[Update]) -> None:
    """Enqueues the updates of `runs` in order, on torch's current stream."""
    for run in runs:
        if run.numel == 0:
            continue
        addresses = (run.weight, run.aux, *run.tensors, run.grad)
        _adamw[(triton.cdiv(run.numel, ELEMENTS_PER_PROGRAM),)](
            run.numel, *addresses, *run.scalars.as_tuple(),
            FORMAT=int(run.weight_format), GRAD=int(run.grad_dtype), ARITHMETIC=int(run.scalars.arithmetic),
            L2=run.scalars.l2 != 0.0,
            DECAY=run.scalars.decay != 0.0 and run.scalars.arithmetic is not Arithmetic.TORCH,
            ALIGNED=all(address % 16 == 0 for address in addresses), BLOCK=ELEMENTS_PER_PROGRAM,
            num_warps=UPDATE_WARPS, **EXACT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "weight", "aux", "exp_avg", "exp_avg_sq", "grad"])
def _adamw(
    numel: tl.int64, weight: tl.int64, aux: tl.int64, exp_avg: tl.int64, exp_avg_sq: tl.int64, grad: tl.int64,
    grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_bias_correction2_sqrt,
    eps, FORMAT: tl.constexpr, GRAD: tl.constexpr, ARITHMETIC: tl.constexpr, L2: tl.constexpr, DECAY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    index = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= numel:  # without a mask: with one, the compiler could not use 16-byte loads
        _adamw_block(
            index, None, weight, aux, exp_avg, exp_avg_sq, grad, grad_scale, l2, decay, beta1, one_minus_beta1, beta2,
            one_minus_beta2, step_size, inverse_bias_correction2_sqrt, eps,
            FORMAT, GRAD, ARITHMETIC, L2, DECAY, ALIGNED,
        )  # fmt: skip
    else:
        _adamw_block(
            index, index < numel, weight, aux, exp_avg, exp_avg_sq, grad, grad_scale, l2, decay, beta1,
            one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_bias_correction2_sqrt, eps,
            FORMAT, GRAD, ARITHMETIC, L2, DECAY, ALIGNED,
        )  # fmt: skip


@triton.jit
def _adamw_block(
    index, mask, weight, aux, exp_avg, exp_avg_sq, grad,
    grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_bias_correction2_sqrt,
    eps, FORMAT: tl.constexpr, GRAD: tl.constexpr, ARITHMETIC: tl.constexpr, L2: tl.constexpr, DECAY: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Updates one block, with the oracle's order of operations. Scalars are created with tl.full, so that they are
    fp32 in Triton's interpreter, too."""
    p = load_weight(weight, aux, index, mask, FORMAT, ALIGNED)
    g = load_gradient(grad, index, mask, GRAD, ALIGNED) * tl.full((), grad_scale, tl.float32)
    m = tl.load(at(exp_avg, index, tl.float32, ALIGNED), mask=mask)
    v = tl.load(at(exp_avg_sq, index, tl.float32, ALIGNED), mask=mask)
    if ARITHMETIC == TORCH:
        if L2:
            g = g + tl.full((), l2, tl.float32) * p
        p = p * tl.full((), decay, tl.float32)
        m = m + (g - m) * tl.full((), one_minus_beta1, tl.float32)
        v = v * tl.full((), beta2, tl.float32) + (g * g) * tl.full((), one_minus_beta2, tl.float32)
        root = tl.sqrt_rn(v) * tl.full((), inverse_bias_correction2_sqrt, tl.float32)
        p = p - tl.full((), step_size, tl.float32) * tl.div_rn(m, root + tl.full((), eps, tl.float32))
    else:
        if L2:
            g = tl.fma(p, tl.full((), l2, tl.float32), g)
        m = _weighted_sum(m, beta1, g, one_minus_beta1, ARITHMETIC)
        v = _weighted_sum(v, beta2, g * g, one_minus_beta2, ARITHMETIC)
        factor, small = tl.full((), inverse_bias_correction2_sqrt, tl.float32), tl.full((), eps, tl.float32)
        quotient = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), factor, small))
        if DECAY:
            p = tl.fma(p, tl.full((), decay, tl.float32) * -1.0, p)  # Triton's own minus is 0 − x: it loses −0
        p = tl.fma(quotient, tl.full((), step_size, tl.float32) * -1.0, p)
    tl.store(at(exp_avg, index, tl.float32, ALIGNED), m, mask=mask)
    tl.store(at(exp_avg_sq, index, tl.float32, ALIGNED), v, mask=mask)
    store_weight(weight, aux, index, mask, p, FORMAT, ALIGNED)


@triton.jit
def _weighted_sum(old, beta, fresh, rest, ARITHMETIC: tl.constexpr):
    """old × beta + fresh × rest: one product is rounded (fresh × rest for DEEPSPEED_TAIL, else old × beta), then the
    other product and the sum are rounded together."""
    beta, rest = tl.full((), beta, tl.float32), tl.full((), rest, tl.float32)
    return tl.fma(old, beta, fresh * rest) if ARITHMETIC == DEEPSPEED_TAIL else tl.fma(fresh, rest, old * beta)
