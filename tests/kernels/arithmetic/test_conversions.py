"""Sixteen bits and back: every fp16 value, every rounding boundary, and the bf16 split of any fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.arithmetic.states import State, run_of
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat
from tidegate.kernels.adamw import native
from tidegate.kernels.adamw.scalars import Scalars
from tidegate.kernels.arithmetic import oracle

Array = np.ndarray[Any, Any]
# m becomes the gradient, the weight stays what it is: an update that only converts
ONLY_CONVERT = Scalars(
    grad_scale=1.0, l2=0.0, decay=1.0, beta1=0.0, one_minus_beta1=1.0, beta2=0.0, one_minus_beta2=0.0, step_size=0.0,
    inverse_bias_correction2_sqrt=1.0, eps=1.0,
)  # fmt: skip
ALL_HALVES = np.arange(65536, dtype=np.uint16)


def convert(master: Array, weight_format: WeightFormat, grad: Array, dtype: GradDtype) -> tuple[Array, Array]:
    """The 16-bit weights that the native code makes of `master`, and its fp32 gradients."""
    weight, master = np.zeros(len(master), np.uint16), master.copy()
    exp_avg, exp_avg_sq = np.zeros((2, len(master)), np.float32)
    with ThreadPool(1) as pool:
        run = run_of(State(weight, master, exp_avg, exp_avg_sq, grad), weight_format, dtype, ONLY_CONVERT)
        native.update(pool, run)
    return weight, exp_avg


def boundaries() -> Array:
    """Every finite fp16 value, every midpoint between two of them, and their fp32 neighbours."""
    with np.errstate(all="ignore"):
        halves = ALL_HALVES.view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    points = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2, np.array([65520, -65520, np.inf], np.float32)])
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])


def test_every_fp16_gradient_is_widened_exactly() -> None:
    _, wide = convert(np.zeros(65536, np.float32), WeightFormat.BF16_MASTER, ALL_HALVES, GradDtype.F16)
    expected = torch.from_numpy(ALL_HALVES.view(np.int16)).view(torch.float16).float().numpy()
    np.testing.assert_array_equal(wide, expected)


def test_fp16_rounds_to_nearest_even_at_every_boundary() -> None:
    points = boundaries()
    halves, _ = convert(points, WeightFormat.F16_MASTER, np.zeros(len(points), np.float32), GradDtype.F32)
    expected = torch.from_numpy(points).half().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(halves, expected)
    np.testing.assert_array_equal(oracle.to_f16(points).view(np.uint16), expected)


@pytest.mark.parametrize(
    ("bits", "hi", "lo"),
    [
        (0x3F800000, 0x3F80, 0),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F808000, 0x3F81, -0x8000),  # a tie goes away from zero, also where the even neighbour lies below
        (0x3F818000, 0x3F82, -0x8000),
        (0xBF808000, 0xBF81, -0x8000),
        (0x80000000, 0x8000, 0),
        (0x00000001, 0x0000, 1),
        (0x3FFFFFFF, 0x4000, -1),  # carry into the exponent
        (0x7F7FFFFF, 0x7F80, -1),  # carry into infinity: the pair still is the largest finite number
        (0xFF7F8000, 0xFF80, -0x8000),
        (0x7F800000, 0x7F80, 0),
        (0x7F800001, 0x7FC0, 0),  # a NaN in the low bits alone stays a NaN
        (0xFFFFFFFF, 0xFFFF, 0),
    ],
)
def test_split_bf16_by_hand(bits: int, hi: int, lo: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    got_hi, got_lo = oracle.split_bf16(value)
    assert (got_hi[0], got_lo[0]) == (hi, lo)
    native_hi, _ = convert(value, WeightFormat.BF16_MASTER, np.zeros(1, np.float32), GradDtype.F32)
    assert np.isnan(value[0]) or native_hi[0] == hi


@given(st.integers(0, 2**32 - 1))
def test_join_bf16_is_the_inverse_of_split(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    joined = oracle.join_bf16(*oracle.split_bf16(value))
    if np.isnan(value[0]):
        assert np.isnan(joined[0])
    else:
        assert joined.view(np.uint32)[0] == bits
