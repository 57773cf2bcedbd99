"""Sums of gradients: bit for bit what a sum in plain steps has, and what torch makes of `.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tidegate import kernels
from tidegate.kernels import GradDtype, ThreadPool
from tidegate.kernels.arithmetic import oracle

Array = np.ndarray[Any, Any]
STORED: dict[GradDtype, Any] = {GradDtype.F32: np.float32, GradDtype.BF16: np.uint16, GradDtype.F16: np.float16}
TORCH = {GradDtype.F32: torch.float32, GradDtype.BF16: torch.bfloat16, GradDtype.F16: torch.float16}
PAIRS = pytest.mark.parametrize(
    ("sum_dtype", "dtype"), [(a, b) for a in GradDtype for b in GradDtype if a in (b, GradDtype.F32)]
)


def accumulate(sums: Array, sum_dtype: GradDtype, grad: Array, dtype: GradDtype) -> None:
    """Adds a gradient to `sums` in place: one fp32 addition, then one rounding (ties to even) to the dtype of
    `sums`."""
    with np.errstate(all="ignore"):
        added: Array = oracle.load_gradient(sums, sum_dtype) + oracle.load_gradient(grad, dtype)
        sums[:] = bf16_nearest_even(added) if sum_dtype is GradDtype.BF16 else added.astype(sums.dtype)


def bf16_nearest_even(values: Array) -> Array:
    """The nearest bf16, ties to even, as torch rounds. It is used for sums of gradients; bf16 weights are rounded with
    ties away from zero."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded


def any_bits(numel: int, dtype: GradDtype, seed: int) -> Array:
    """Every kind of number: denormals, infinities, NaN, and among 16 bits many ties."""
    rng = np.random.default_rng([numel, seed])
    wide, half = rng.integers(0, 2**32, numel, np.uint32), rng.integers(0, 2**16, numel, np.uint16)
    return wide.view(np.float32) if dtype is GradDtype.F32 else half.view(STORED[dtype])


def near(numel: int, dtype: GradDtype, seed: int) -> Array:
    """Of like size, so that sums round."""
    values = np.random.default_rng([numel, seed]).standard_normal(numel).astype(np.float32)
    return bf16_nearest_even(values) if dtype is GradDtype.BF16 else values.astype(STORED[dtype])


def same(found: Array, expected: Array, dtype: GradDtype) -> None:
    """Bit for bit; a NaN is a NaN."""
    nan = np.isnan(oracle.load_gradient(expected, dtype))
    np.testing.assert_array_equal(np.isnan(oracle.load_gradient(found, dtype)), nan)
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}")[~nan], expected.view(f"u{found.itemsize}")[~nan])


def native(pool: ThreadPool, sums: Array, sum_dtype: GradDtype, grad: Array, dtype: GradDtype) -> Array:
    found = np.concatenate([sums[:1], sums])[1:]  # not aligned to a vector
    kernels.accumulate(pool, found.ctypes.data, sum_dtype, grad.ctypes.data, dtype, len(grad))
    return found


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.instruction_set()
    kernels.use_instruction_set(request.param)
    yield request.param
    kernels.use_instruction_set(before)


@pytest.mark.parametrize("isa", kernels.instruction_sets(), indirect=True)
@PAIRS
@pytest.mark.parametrize("make", [any_bits, near])
def test_equals_the_oracle(isa: str, sum_dtype: GradDtype, dtype: GradDtype, make: Any) -> None:
    with ThreadPool(2) as pool:
        for numel in (0, 1, 15, 17, 65536, 3 * 65536 + 7):
            sums, grad = make(numel, sum_dtype, 0), make(numel, dtype, 1)
            expected = sums.copy()
            accumulate(expected, sum_dtype, grad, dtype)
            same(native(pool, sums, sum_dtype, grad, dtype), expected, sum_dtype)


@PAIRS
@pytest.mark.parametrize("make", [any_bits, near])
def test_is_what_torch_adds(sum_dtype: GradDtype, dtype: GradDtype, make: Any) -> None:
    sums, grad = make(200_003, sum_dtype, 2), make(200_003, dtype, 3)

    def tensor(array: Array, kind: GradDtype) -> torch.Tensor:
        return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(TORCH[kind])

    added = tensor(sums, sum_dtype).add_(tensor(grad, dtype))
    expected = added.view(torch.int32 if sum_dtype is GradDtype.F32 else torch.int16).numpy().view(STORED[sum_dtype])
    with ThreadPool(2) as pool:
        same(native(pool, sums, sum_dtype, grad, dtype), expected, sum_dtype)


@pytest.mark.parametrize(
    ("sums", "grad", "expected"),
    [
        (0x3F80, 0x3B80, 0x3F80),  # 1 + 2^-8: a tie, the even one is below
        (0x3F81, 0x3B80, 0x3F82),  # the even one is above
        (0x7F7F, 0x7F7F, 0x7F80),  # too large: infinity
        (0x8000, 0x8000, 0x8000),  # -0 + -0
        (0x8000, 0x0000, 0x0000),
        (0x0001, 0x0001, 0x0002),  # denormals
    ],
)
def test_bf16_by_hand(sums: int, grad: int, expected: int) -> None:
    with ThreadPool(1) as pool:
        found = native(pool, np.array([sums], np.uint16), GradDtype.BF16, np.array([grad], np.uint16), GradDtype.BF16)
    assert found[0] == expected


def test_what_cannot_work_is_refused() -> None:
    with ThreadPool(1) as pool:
        with pytest.raises(ValueError, match="sums is at address 0"):
            kernels.accumulate(pool, 0, GradDtype.F32, 4096, GradDtype.F32, 1)
        with pytest.raises(ValueError, match="address is at address 4097"):
            kernels.accumulate(pool, 4096, GradDtype.F32, 4097, GradDtype.BF16, 1)
