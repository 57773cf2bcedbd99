"""The fallback in plain torch: within fp32 rounding of the oracle, exact where it only converts, on wrapped memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.arithmetic.states import (
    Array,
    State,
    assert_same,
    by_oracle,
    of,
    ordinary,
    run_of,
    special,
)
from tidegate.kernels import GradDtype, WeightFormat, implementation
from tidegate.kernels.adamw.scalars import Arithmetic, scalars
from tidegate.kernels.arithmetic import oracle, torch_kernels
from tidegate.kernels.arithmetic.device_calls import GradRef, Update

FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
DTYPES = pytest.mark.parametrize("grad_dtype", list(GradDtype))
ARITHMETICS = pytest.mark.parametrize("arithmetic", list(Arithmetic))
DECOUPLED = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "CHUNK_NUMEL", 1000)


def update(run: Update) -> None:
    """By the rule with the arithmetic of this run."""
    rule = "adamw" if run.scalars.arithmetic is Arithmetic.TORCH else "deepspeed_adamw"
    implementation(rule).in_torch("cpu").update([run])


def master_of(state: State, weight_format: WeightFormat) -> Array:
    return oracle.load_weight(state.weight, weight_format, state.aux)


@FORMATS
@DTYPES
@DECOUPLED
@ARITHMETICS
@pytest.mark.parametrize("numel", [0, 1, 999, 1000, 2500])
def test_agrees_within_fp32_rounding(
    weight_format: WeightFormat, grad_dtype: GradDtype, decoupled: bool, arithmetic: Arithmetic, numel: int
) -> None:
    state = ordinary(numel, weight_format, grad_dtype)
    expected = state.copy()
    values = of(arithmetic, scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, 2, decoupled, grad_scale=0.3))
    update(run_of(state, weight_format, grad_dtype, values))
    by_oracle(expected, weight_format, grad_dtype, values)
    np.testing.assert_array_equal(state.exp_avg, expected.exp_avg)
    np.testing.assert_array_equal(state.exp_avg_sq, expected.exp_avg_sq)
    ours, oracles = master_of(state, weight_format), master_of(expected, weight_format)
    np.testing.assert_allclose(ours, oracles, rtol=1e-6, atol=1e-9)
    if weight_format is not WeightFormat.F32:
        rounded = oracle.to_f16 if weight_format is WeightFormat.F16_MASTER else oracle.to_bf16
        np.testing.assert_array_equal(state.weight.view(np.uint16), rounded(ours).view(np.uint16))


@FORMATS
@DTYPES
@ARITHMETICS
def test_special_values_are_converted_exactly(
    weight_format: WeightFormat, grad_dtype: GradDtype, arithmetic: Arithmetic
) -> None:
    """A rate of 0: no square root has a say in the weight, and NaN, infinities, ties and denormals come as they are."""
    state = special(weight_format, grad_dtype)
    finite = np.isfinite(state.exp_avg_sq) & (state.exp_avg_sq > 0) & np.isfinite(state.exp_avg)
    state = State(*(None if a is None else a[finite] for a in state.arrays()))
    expected = state.copy()
    values = of(arithmetic, scalars(0.0, 0.9, 0.999, 1e-8, 0.1, step=2))
    update(run_of(state, weight_format, grad_dtype, values))
    by_oracle(expected, weight_format, grad_dtype, values)
    assert_same(state, expected)


@DTYPES
@pytest.mark.parametrize("numel", [0, 1, 2500])
def test_sum_of_squares(grad_dtype: GradDtype, numel: int) -> None:
    grad = ordinary(numel, WeightFormat.F32, grad_dtype).grad
    bad_values = np.array([np.nan, np.inf, -np.inf], np.float32)
    if numel > 3:
        bad = bad_values if grad_dtype is GradDtype.F32 else oracle.to_bf16(bad_values)
        grad[7:10] = bad_values.astype(np.float16) if grad_dtype is GradDtype.F16 else bad
    sums, bad_counts = torch.full((2,), 5.0, dtype=torch.float64), torch.full((2,), 5)
    kernels = implementation("adamw").in_torch("cpu")
    kernels.sum_of_squares([GradRef(grad.ctypes.data, numel, grad_dtype), GradRef(0, 0, grad_dtype)], sums, bad_counts)
    total, count = oracle.sum_of_squares(grad, grad_dtype)
    assert sums.tolist() == [pytest.approx(total, rel=1e-14), 0.0]
    assert bad_counts.tolist() == [count, 0]


def test_a_wrapped_address_is_the_memory_itself() -> None:
    array = np.arange(10, dtype=np.float32)
    tensor = torch_kernels.wrap(array.ctypes.data + 8, 5, torch.float32, "cpu")
    assert tensor.tolist() == [2, 3, 4, 5, 6]
    tensor[0] = -1
    assert array[2] == -1
    assert torch_kernels.wrap(array.ctypes.data, 3, torch.bfloat16, "cpu").dtype is torch.bfloat16
    with pytest.raises(ValueError, match="'tpu'"):
        torch_kernels.wrap(array.ctypes.data, 1, torch.float32, "tpu")
