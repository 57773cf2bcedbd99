"""Self-test of the GPU kernels: runs each on small arrays and compares with the oracle, so that failures and
differences are known before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.device_calls import GpuKernels, GradRef, Update
from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat
from tidegate.kernels.arithmetic.implementation import TritonUpdate

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


def differences(kernels: GpuKernels, device: torch.device, update: TritonUpdate) -> list[str]:
    """Runs each kernel on `device`, in each variant for which it is compiled, and waits. Returns the names of the
    results that differ from the oracle's by any bit.

    update: the rule's trials. Every other one has unusual gradients and unaligned arrays, and the first one is repeated
        with unaligned arrays, for which many layouts ask. So trials and arrays reach each branch, but not every
        combination, which would take minutes to compile.

    Errors of a launch are not caught.
    """
    found = []
    with _current_device(device):
        for name, values, grads, is_aligned in _trials(update):
            about = (name, "another gradient" if grads is OTHER_GRADS else "", "" if is_aligned else "unaligned")
            words = ", ".join(filter(None, about))
            found += [
                f"the update of {weight.name} weights" + (f" ({words})" if words else "")
                for weight in WeightFormat
                if not _updates(kernels, device, update, weight, values, grads[weight], is_aligned)
            ]
        return found + [f"the sum of squares of {name} gradients" for name in _wrong_sums(kernels, device)]


def _trials(update: TritonUpdate) -> Iterator[tuple[str, Any, Mapping[WeightFormat, GradDtype], bool]]:
    """Name, scalars, gradient dtypes and whether the arrays are aligned, for each run of the kernel."""
    for number, (name, values) in enumerate(update.trials.items()):
        is_usual = number % 2 == 0
        yield name, values, USUAL_GRADS if is_usual else OTHER_GRADS, is_usual
        if number == 0:
            yield name, values, USUAL_GRADS, False


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _updates(
    kernels: GpuKernels, device: torch.device, update: TritonUpdate, form: WeightFormat, values: Any,
    grad_dtype: GradDtype, is_aligned: bool,
) -> bool:  # fmt: skip
    """Runs one update on normal and denormal numbers. Returns whether all results equal those of the oracle bit for
    bit."""
    master, numbers, grad = _numbers(3)
    weight, aux = _weight(master, form)
    state = update.trial_state(numbers)
    arrays = (weight, aux, _as_grad(grad, grad_dtype), *state)
    tensors = [None if array is None else _on_device(array, device, is_aligned) for array in arrays]
    at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    kernels.update([Update(NUMEL, at[0], form, at[1], tuple(at[3:]), at[2], grad_dtype, values)])
    update.oracle(weight, form, aux, state, arrays[2], grad_dtype, values)
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
    refs = [GradRef(t.data_ptr(), NUMEL, dtype) for t, dtype in zip(tensors, GradDtype, strict=True)]
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
