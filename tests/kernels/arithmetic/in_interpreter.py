"""The Triton kernels equal the oracle bit for bit, in Triton's interpreter: test_triton.py runs this file.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, so this needs a process of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.arithmetic.states import Array, State, assert_same, by_oracle, of, ordinary, run_of, special
from tidegate.kernels import GradDtype, WeightFormat, implementation
from tidegate.kernels.adamw import triton_adamw
from tidegate.kernels.adamw.scalars import SCALAR_NAMES, Arithmetic, Scalars, scalars
from tidegate.kernels.arithmetic import oracle, self_test, triton_kernels
from tidegate.kernels.arithmetic.device_calls import GradRef

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy: NaN and overflow
FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
SLOW = pytest.mark.slow
"""What `make test` leaves to `make test-all`: other gradients and sizes take the same ways through the kernels."""
DTYPES = pytest.mark.parametrize(
    "grad_dtype", [GradDtype.BF16, pytest.param(GradDtype.F16, marks=SLOW), pytest.param(GradDtype.F32, marks=SLOW)]
)
DECOUPLED = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])


def check(state: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    expected = state.copy()
    triton_adamw.update([run_of(state, weight_format, grad_dtype, values)])
    by_oracle(expected, weight_format, grad_dtype, values)
    assert_same(state, expected)


@FORMATS
@DTYPES
@DECOUPLED
def test_special_values(weight_format: WeightFormat, grad_dtype: GradDtype, decoupled: bool) -> None:
    for lr, grad_scale in ((0.0, 1.0), (1e-3, 0.7), (1e-3, -1.0)):
        values = scalars(lr, 0.9, 0.999, 1e-8, 0.1, step=2, decoupled=decoupled, grad_scale=grad_scale)
        check(special(weight_format, grad_dtype), weight_format, grad_dtype, values)


@FORMATS
@DTYPES
@pytest.mark.parametrize("arithmetic", [Arithmetic.DEEPSPEED, Arithmetic.DEEPSPEED_TAIL])
def test_special_values_as_deepspeed_rounds(
    weight_format: WeightFormat, grad_dtype: GradDtype, arithmetic: Arithmetic
) -> None:
    for decoupled, weight_decay in ((True, 0.1), (False, 0.1), (True, 0.0)):
        values = scalars(1e-3, 0.9, 0.999, 1e-8, weight_decay, step=2, decoupled=decoupled, grad_scale=0.7)
        check(special(weight_format, grad_dtype), weight_format, grad_dtype, of(arithmetic, values))
        check(ordinary(2500, weight_format, grad_dtype), weight_format, grad_dtype, of(arithmetic, values))


@FORMATS
@DTYPES
@pytest.mark.parametrize(
    "numel", [0, 1025, 3000, *(pytest.param(numel, marks=SLOW) for numel in (1, 7, 1023, 1024, 4096))]
)
def test_odd_sizes(weight_format: WeightFormat, grad_dtype: GradDtype, numel: int) -> None:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7, grad_scale=0.3)
    check(ordinary(numel, weight_format, grad_dtype), weight_format, grad_dtype, values)


@FORMATS
def test_aligned_arrays(weight_format: WeightFormat) -> None:
    """All of the others begin one element late."""
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7)
    whole = ordinary(5000 + 64, weight_format, GradDtype.BF16)
    skips = [0 if a is None else (-a.ctypes.data % 16) // a.itemsize for a in whole.arrays()]
    parts = [None if a is None else a[k : k + 5000] for a, k in zip(whole.arrays(), skips, strict=True)]
    assert all(a is None or a.ctypes.data % 16 == 0 for a in parts)
    check(State(*parts), weight_format, GradDtype.BF16, values)


@pytest.mark.parametrize("extreme", [1e-42, 3e38, np.inf, np.nan])
def test_extreme_scalars_are_fp32(extreme: float) -> None:
    for name, arithmetic in itertools.product(SCALAR_NAMES, Arithmetic):
        values = of(arithmetic, scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7, decoupled=False))
        values = replace(values, **{name: float(np.float32(extreme))})
        check(ordinary(100, WeightFormat.F32, GradDtype.F32), WeightFormat.F32, GradDtype.F32, values)


def test_runs_are_updated_in_order_each_with_its_scalars() -> None:
    state, expected = (ordinary(2000, WeightFormat.BF16_REMAINDER, GradDtype.BF16) for _ in range(2))
    runs = []
    for step, part in ((1, slice(0, 700)), (2, slice(700, 2000)), (3, slice(0, 2000))):
        values = scalars(1e-3 * step, 0.9, 0.95, 1e-8, 0.1, step)
        runs.append(run_of(state.slice(part), WeightFormat.BF16_REMAINDER, GradDtype.BF16, values))
        by_oracle(expected.slice(part), WeightFormat.BF16_REMAINDER, GradDtype.BF16, values)
    triton_adamw.update(runs)
    assert_same(state, expected)


def any_bits(numel: int, dtype: GradDtype, seed: int) -> Array:
    bits: np.ndarray[Any, Any] = np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32)
    if dtype is GradDtype.F32:
        return bits.view(np.float32)
    halves = bits.astype(np.uint16)
    return halves if dtype is GradDtype.BF16 else halves.view(np.float16)


def check_sums(arrays: list[tuple[Array, GradDtype]]) -> None:
    sums, bad = torch.full((len(arrays),), -1.0, dtype=torch.float64), torch.full((len(arrays),), -1)
    refs = [GradRef(array.ctypes.data if len(array) else 0, len(array), dtype) for array, dtype in arrays]
    triton_kernels.sum_of_squares(refs, sums, bad)
    expected = [oracle.sum_of_squares(array, dtype) for array, dtype in arrays]
    assert list(zip(sums.tolist(), bad.tolist(), strict=True)) == expected


def test_sums_of_all_dtypes_in_one_call() -> None:
    numels = (0, 1, 15, 16, 17, 255, 256, 257, 1000)
    check_sums([(any_bits(numel + 1, dtype, numel)[1:], dtype) for numel in numels for dtype in GradDtype])


@SLOW
def test_sums_of_whole_blocks() -> None:
    """Lane by lane in the stated order: any other order of 65536 additions gives other bits."""
    values = np.random.default_rng(0).standard_normal(2 * 65536 + 33).astype(np.float32)
    check_sums([(values, GradDtype.F32)])


@pytest.mark.parametrize(
    "num_blocks", [3, 31, 1025, *(pytest.param(count, marks=SLOW) for count in (2, 5, 7, 1023, 1024, 2049, 3001))]
)
def test_trees_of_many_blocks(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Blocks of 16 elements, so that the tree has many leaves and the interpreter is done today."""
    monkeypatch.setattr(oracle, "BLOCK_NUMEL", 16)
    for name, value in (("BLOCK_NUMEL", 16), ("ROWS_AT_ONCE", 1), ("BLOCKS_PER_PROGRAM", 64)):
        monkeypatch.setattr(triton_kernels, name, value)
    values = np.random.default_rng(num_blocks).standard_normal(16 * num_blocks - 5).astype(np.float32)
    check_sums([(values[:40], GradDtype.F32), (values, GradDtype.F32), (values[:16], GradDtype.F32)])


def test_no_gradients() -> None:
    check_sums([])
    check_sums([(np.zeros(0, np.float32), GradDtype.F32)])


@pytest.mark.parametrize("rule", ["adamw", "deepspeed_adamw"])
def test_the_trial_at_construction_finds_no_difference(rule: str) -> None:
    update = implementation(rule).triton
    assert update is not None
    assert self_test.differences(triton_adamw, torch.device("cpu"), update) == []
