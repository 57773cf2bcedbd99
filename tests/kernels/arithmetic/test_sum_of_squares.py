"""The norm's sum: one tree for all sizes, dtypes and thread counts, and non-finite elements counted apart."""

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
DTYPES = pytest.mark.parametrize("dtype", list(GradDtype))


def native(pool: ThreadPool, elements: Array, dtype: GradDtype) -> tuple[float, int]:
    return kernels.sum_of_squares(pool, elements.ctypes.data, len(elements), dtype)


def any_bits(numel: int, dtype: GradDtype) -> Array:
    rng = np.random.default_rng(numel)
    if dtype is GradDtype.F32:
        return rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32)
    halves = rng.integers(0, 2**16, numel, dtype=np.uint16)
    return halves if dtype is GradDtype.BF16 else halves.view(np.float16)


def stored(values: Array, dtype: GradDtype) -> Array:
    single = values.astype(np.float32)
    return {GradDtype.F32: single, GradDtype.BF16: oracle.to_bf16(single), GradDtype.F16: oracle.to_f16(single)}[dtype]


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.instruction_set()
    kernels.use_instruction_set(request.param)
    yield request.param
    kernels.use_instruction_set(before)


@pytest.mark.parametrize("isa", kernels.instruction_sets(), indirect=True)
@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_equals_the_oracle(isa: str, dtype: GradDtype, num_threads: int) -> None:
    with ThreadPool(num_threads) as pool:
        for numel in (0, 1, 15, 16, 17, 65535, 65536, 65537, 5 * 65536 + 3, 7 * 65536):
            elements = any_bits(numel + 1, dtype)[1:]  # not aligned to a vector
            assert native(pool, elements, dtype) == oracle.sum_of_squares(elements, dtype)


@pytest.mark.parametrize("isa", kernels.instruction_sets(), indirect=True)
@DTYPES
def test_blocks_with_and_without_non_finite_elements(isa: str, dtype: GradDtype) -> None:
    """Blocks whose elements are all finite are summed by another loop, which stages some of them first."""
    with ThreadPool(2) as pool:
        for numel in (511, 512, 513, 65536, 3 * 65536 + 529):
            elements = stored(np.random.default_rng(numel).standard_normal(numel + 1), dtype)[1:]
            assert oracle.sum_of_squares(elements, dtype)[1] == 0
            assert native(pool, elements, dtype) == oracle.sum_of_squares(elements, dtype)
            elements[-1] = stored(np.array([np.nan]), dtype)[0]
            assert native(pool, elements, dtype) == oracle.sum_of_squares(elements, dtype)


@pytest.mark.parametrize(
    ("values", "total", "nonfinite"),
    [
        ([], 0.0, 0),
        ([3.0, -4.0], 25.0, 0),
        ([3.0, np.nan, np.inf, -np.inf, 4.0], 25.0, 3),
        ([3e38, 3e38], 2 * float(np.float32(3e38)) ** 2, 0),
        ([1e-45], float(np.float32(1e-45)) ** 2, 0),
        ([np.nan] * 100_000, 0.0, 100_000),
    ],
)
def test_by_hand(values: list[float], total: float, nonfinite: int) -> None:
    with ThreadPool(2) as pool:
        assert native(pool, np.array(values, np.float32), GradDtype.F32) == (total, nonfinite)


def test_the_oracle_is_near_the_true_sum() -> None:
    elements = np.random.default_rng(0).standard_normal(300_001).astype(np.float32)
    exact = float(np.sum(elements.astype(np.longdouble) ** 2))
    assert oracle.sum_of_squares(elements, GradDtype.F32)[0] == pytest.approx(exact, rel=1e-14)


def test_denormals_survive_a_caller_who_flushes_them() -> None:
    elements = np.full(200_000, 1e-42, np.float32)
    expected = oracle.sum_of_squares(elements, GradDtype.F32)
    assert expected[0] > 0
    torch.set_flush_denormal(True)
    try:
        with ThreadPool(2) as pool:
            assert native(pool, elements, GradDtype.F32) == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("total_norm", "max_norm", "expected"), [(0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (4.0, 1.0, np.float32(1 / 4.000001))]
)
def test_clip_scale(total_norm: float, max_norm: float, expected: float) -> None:
    scale = oracle.clip_scale(total_norm, max_norm)
    assert scale == expected
    assert scale.dtype == np.float32
