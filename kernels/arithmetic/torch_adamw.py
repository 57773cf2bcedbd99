"""The update and the sum of squares in plain torch operations, for GPUs where Triton is not installed.

It has the same functions as `triton_adamw`, but makes about 30 passes over memory instead of one (with DeepSpeed's
arithmetic about 130, most of them in fp64). Rounding: every step is one elementwise operation, so that each is rounded
once and in the oracle's order. But it is not guaranteed that torch's square root and division are rounded correctly (on
some CPUs the fp32 square root is not). So results agree with the oracle within fp32 rounding, not bit for bit.
Conversions of 16-bit formats are exact. The sum of squares is added in torch's order, and agrees within fp64 rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tidegate.kernels.arithmetic.device_calls import Gradient, Update, on_stream
from tidegate.kernels.arithmetic.scalars import Arithmetic, GradDtype, Scalars, WeightFormat

CHUNK_NUMEL = 1 << 22
"""Elements that are updated at a time; this limits temporary tensors to about 100 MiB."""
GRAD_DTYPES = {GradDtype.F32: torch.float32, GradDtype.BF16: torch.bfloat16, GradDtype.F16: torch.float16}


def update(runs: Sequence[Update], stream: int | None = None, device_type: str = "cuda") -> None:
    """Enqueues the updates of `runs` in order. `stream`: a CUDA stream's handle; None for torch's current one."""
    with on_stream(stream), torch.no_grad():
        for run in runs:
            for begin, numel in _chunks(run.numel):
                _update_chunk(run, begin, numel, device_type)


def sum_of_squares(refs: Sequence[Gradient], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
    """Enqueues, for each gradient, the fp64 sum of squares of its finite elements, and the number of non-finite ones.

    out_sums, out_bad: fp64 and int64 tensors on the device, one element for each of `refs`.
    """
    out_sums.zero_()
    out_bad.zero_()
    with torch.no_grad():
        for i, ref in enumerate(refs):
            for begin, numel in _chunks(ref.numel):
                address = ref.address + begin * ref.dtype.nbytes
                values = wrap(address, numel, GRAD_DTYPES[ref.dtype], out_sums.device.type).double()
                finite = values.isfinite()
                out_sums[i] += values.where(finite, 0.0).square_().sum()
                out_bad[i] += (~finite).sum()


def wrap(address: int, numel: int, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """The `numel` elements at `address` as a tensor that does not own its memory; the memory must outlive the
    tensor."""
    if device_type == "cuda":
        return torch.as_tensor(_CudaMemory(address, numel * dtype.itemsize), device="cuda").view(dtype)
    if device_type != "cpu":
        raise ValueError(f"device_type is {device_type!r}, must be 'cpu' or 'cuda'")
    return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


class _CudaMemory:
    """Bytes on a GPU with the CUDA array interface, from which torch makes a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, numel, CHUNK_NUMEL):
        yield begin, min(CHUNK_NUMEL, numel - begin)


def _update_chunk(run: Update, begin: int, numel: int, device_type: str) -> None:
    """Updates the elements `begin` to `begin` + `numel` of the arrays of `run`. It does not use the arguments `alpha`
    and `value` of torch functions, because with these a device might round a product and a sum together."""

    def at(address: int, dtype: torch.dtype) -> torch.Tensor:
        return wrap(address + begin * dtype.itemsize, numel, dtype, device_type)

    exp_avg, exp_avg_sq = at(run.exp_avg, torch.float32), at(run.exp_avg_sq, torch.float32)
    grad = at(run.grad, GRAD_DTYPES[run.grad_dtype]).float()
    s: Scalars = run.scalars
    if run.weight_format is WeightFormat.BF16_REMAINDER:
        hi, lo = at(run.weight, torch.int16), at(run.aux, torch.int16)
        master = _step(((hi.int() << 16) + lo.int()).view(torch.float32), grad, exp_avg, exp_avg_sq, s)
        bits = _tamed_bits(master)
        hi.copy_(_bf16_of(bits))
        lo.copy_((bits << 16) >> 16)
        return
    where = run.weight if run.weight_format is WeightFormat.F32 else run.aux
    master = at(where, torch.float32)
    master.copy_(_step(master, grad, exp_avg, exp_avg_sq, s))
    if run.weight_format is WeightFormat.F16_MASTER:
        at(run.weight, torch.float16).copy_(master)
    elif run.weight_format is WeightFormat.BF16_MASTER:
        at(run.weight, torch.int16).copy_(_bf16_of(_tamed_bits(master)))


def _step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars) -> torch.Tensor:
    """One update with the oracle's arithmetic: changes the moments in place, and returns the new master."""
    g = g * s.grad_scale
    if s.arithmetic is not Arithmetic.TORCH:
        return _deepspeed_step(p, g, m, v, s)
    if s.l2 != 0.0:
        g = g + p * s.l2
    p = p * s.decay
    m.add_((g - m) * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * g) * s.one_minus_beta2)
    return p - (m / (v.sqrt() * s.inverse_bias_correction2_sqrt + s.eps)) * s.step_size


def _deepspeed_step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars) -> torch.Tensor:
    if s.l2 != 0.0:
        g = fma(p, s.l2, g)
    square = g * g
    if s.arithmetic is Arithmetic.DEEPSPEED_TAIL:
        m.copy_(fma(m, s.beta1, g * s.one_minus_beta1))
        v.copy_(fma(v, s.beta2, square * s.one_minus_beta2))
    else:
        m.copy_(fma(g, s.one_minus_beta1, m * s.beta1))
        v.copy_(fma(square, s.one_minus_beta2, v * s.beta2))
    quotient = m / fma(v.sqrt(), s.inverse_bias_correction2_sqrt, torch.full_like(v, s.eps))
    if s.decay != 0.0:
        p = fma(p, -s.decay, p)
    return fma(quotient, -s.step_size, p)


def fma(a: torch.Tensor, b: float, c: torch.Tensor) -> torch.Tensor:
    """Fused multiply-add: a × b + c in fp32, rounded once, as in `oracle.fma`. `b` is an fp32 value."""
    product, added = a.double() * b, c.double()
    total = product + added
    part = total - product
    excess = (total - part - product) - (added - part)
    bits = total.view(torch.int64)
    even = total.isfinite() & (excess != 0) & ((bits & 1) == 0)
    towards_zero = (excess > 0) == (total > 0)
    bits += even * (1 - 2 * towards_zero.long())
    return total.float()


def _tamed_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 values as int32. Every NaN is replaced by a quiet NaN whose low 16 bits are 0. So a NaN stays a
    NaN when it is rounded to bf16, and its remainder is 0."""
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), (bits | 0x00400000) & -0x10000, bits)


def _bf16_of(tamed: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to bf16 (nearest, ties away from zero), as int16 bits. `tamed`: the fp32 values as returned
    by `_tamed_bits`."""
    return ((tamed + 0x8000) >> 16).short()
