"""Self-test of the GPU kernels: runs each on small arrays and compares with the oracle, so that failures and
differences are known before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.device_calls import GpuKernels
from tidegate.kernels.arithmetic.scalars import Arithmetic, GradDtype, Scalars, WeightFormat, scalars

NUMEL = 1100
"""Number of elements of each array of the self-test. It is no multiple of the kernel's block, so that the test covers a
full block and a partial block."""
USUAL_GRADS = {
    WeightFormat.F32: GradDtype.F32,
    WeightFormat.BF16_REMAINDER: GradDtype.BF16,
    WeightFormat.F16_MASTER: GradDtype.F16,
    WeightFormat.BF16_MASTER: GradDtype.BF16,
}
OTHER_GRADS = {weight: GradDtype.BF16 if weight is WeightFormat.F32 else GradDtype.F32 for weight in WeightFormat}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TrialUpdate:
    """The arguments of one update of the self-test: arrays by address, their formats and the scalars. It implements the
    protocol `Update`."""

    numel: int
    weight: int
    weight_format: WeightFormat
    aux: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    grad_dtype: GradDtype
    scalars: Scalars


@dataclass(frozen=True)
class TrialGradient:
    """A gradient of the self-test: address, number of elements and dtype. It implements the protocol `Gradient`."""

    address: int
    numel: int
    dtype: GradDtype


@dataclass(frozen=True)
class Variant:
    """A variant of the update, apart from the weight's format: gradient dtype, scalars and alignment. Kernels are
    compiled for each variant."""

    name: str
    grads: Mapping[WeightFormat, GradDtype]
    scalars: Scalars
    is_aligned: bool = True


def variants() -> tuple[Variant, ...]:
    """The variants of the update that the self-test runs. Together they cover every branch of the kernel. They are not
    all combinations, because it would take minutes to compile these."""
    adamw = scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37)
    adam = scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37, decoupled=False)
    deepspeed = replace(adamw, arithmetic=Arithmetic.DEEPSPEED, decay=1e-4)
    return (
        Variant("", USUAL_GRADS, adamw),
        Variant(" (Adam's L2, another gradient, unaligned)", OTHER_GRADS, adam, is_aligned=False),
        Variant(" (DeepSpeed's arithmetic)", USUAL_GRADS, deepspeed),
    )


def differences(kernels: GpuKernels, device: torch.device) -> list[str]:
    """Runs each kernel in each of `variants` on `device`, and waits. Returns the names of the results that differ from
    the oracle's by any bit.

    Errors of a launch are not caught.
    """
    with _current_device(device):
        found = [
            f"the update of {weight.name} weights{variant.name}"
            for variant in variants() for weight in WeightFormat if not _updates(kernels, device, weight, variant)
        ]  # fmt: skip
        return found + [f"the sum of squares of {name} gradients" for name in _wrong_sums(kernels, device)]


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _updates(kernels: GpuKernels, device: torch.device, weight_format: WeightFormat, variant: Variant) -> bool:
    """Runs one update on normal and denormal numbers. Returns whether all results equal those of the oracle bit for
    bit."""
    grad_dtype, values = variant.grads[weight_format], variant.scalars
    master, exp_avg, grad = _numbers(3)
    exp_avg_sq = np.square(exp_avg)  # where exp_avg is small, this is denormal
    weight, aux = _weight(master, weight_format)
    arrays = (weight, aux, exp_avg, exp_avg_sq, _as_grad(grad, grad_dtype))
    tensors = [None if array is None else _on_device(array, device, variant.is_aligned) for array in arrays]
    at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    kernels.update([TrialUpdate(NUMEL, at[0], weight_format, at[1], at[2], at[3], at[4], grad_dtype, values)])
    with np.errstate(all="ignore"):
        oracle.adamw_update(weight, weight_format, aux, exp_avg, exp_avg_sq, arrays[4], grad_dtype, values)
    return all(
        tensor is None or array is None or np.array_equal(tensor.cpu().numpy(), array.view(np.uint8))
        for tensor, array in zip(tensors, arrays, strict=True)
    )


def _wrong_sums(kernels: GpuKernels, device: torch.device) -> Iterator[str]:
    """The gradient dtypes whose sum of squares, or number of non-finite elements, differs from the oracle's."""
    (numbers,) = _numbers(1)
    numbers[7] = np.inf
    grads = [_as_grad(numbers, dtype) for dtype in GradDtype]
    tensors = [_on_device(grad, device) for grad in grads]
    refs = [TrialGradient(t.data_ptr(), NUMEL, dtype) for t, dtype in zip(tensors, GradDtype, strict=True)]
    sums = torch.empty(len(refs), dtype=torch.float64, device=device)
    bad = torch.empty(len(refs), dtype=torch.int64, device=device)
    kernels.sum_of_squares(refs, sums, bad)
    for dtype, grad, found in zip(GradDtype, grads, zip(sums.tolist(), bad.tolist(), strict=True), strict=True):
        if found != oracle.sum_of_squares(grad, dtype):
            yield dtype.name


def _numbers(count: int) -> Array:
    """Random fp32 numbers of shape (count, NUMEL), with magnitudes from those of weights down to denormal numbers."""
    rng = np.random.default_rng(0)
    magnitudes = 10.0 ** rng.uniform(-42, -1, (count, NUMEL))
    numbers: Array = (rng.standard_normal((count, NUMEL)) * magnitudes).astype(np.float32)
    return numbers


def _weight(master: Array, weight_format: WeightFormat) -> tuple[Array, Array | None]:
    if weight_format is WeightFormat.F32:
        return master, None
    if weight_format is WeightFormat.BF16_REMAINDER:
        return oracle.split_bf16(master)
    narrow = oracle.to_f16 if weight_format is WeightFormat.F16_MASTER else oracle.to_bf16
    return narrow(master), master


def _as_grad(values: Array, dtype: GradDtype) -> Array:
    if dtype is GradDtype.F32:
        return values
    return oracle.to_bf16(values) if dtype is GradDtype.BF16 else oracle.to_f16(values)


def _on_device(array: Array, device: torch.device, is_aligned: bool = True) -> torch.Tensor:
    """A copy of the bytes of `array` on `device`. If `is_aligned` is False, it begins one element after the start of
    its memory, and so is not aligned."""
    data = array.view(np.uint8)
    skipped = 0 if is_aligned else array.itemsize
    memory = torch.empty(skipped + len(data), dtype=torch.uint8, device=device)
    memory[skipped:] = torch.from_numpy(data.copy()).to(device)
    return memory[skipped:]
