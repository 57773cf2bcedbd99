"""The native update equals the oracle bit for bit, and torch within fp32 rounding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import kernels
from tidegate.kernels import GradDtype, Scalars, ThreadPool, WeightFormat, oracle, scalars

Array = np.ndarray[Any, Any]

# bits of fp32: zeros, denormals, exact ties of bf16 and fp16, carries into the next exponent and into infinity, NaN
SPECIAL = [
    *(0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x387FE000),
    *(0x3F800000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x3FFFFFFF, 0x3FFF8000, 0x477FEFFF, 0x477FF000),
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x40490FDB, 0x2B8CBCCC),
]
SPECIAL_F32 = np.array([*SPECIAL, *(bits | 0x80000000 for bits in SPECIAL)], np.uint32).view(np.float32)
SPECIAL_F16 = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3555, 0x7BFF, 0x7C00, 0x7C01, 0x7E00], np.uint16)
FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
DTYPES = pytest.mark.parametrize("grad_dtype", list(GradDtype))
DECOUPLED = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])


@dataclass
class State:
    """The arrays of one update."""

    weight: Array
    aux: Array | None
    exp_avg: Array
    exp_avg_sq: Array
    grad: Array

    def copy(self) -> State:
        return State(*(None if a is None else a.copy() for a in self.arrays()))

    def arrays(self) -> Iterator[Array | None]:
        return (getattr(self, field.name) for field in fields(self))

    def slice(self, part: slice) -> State:
        return State(*(None if a is None else a[part] for a in self.arrays()))


def make(master: Array, exp_avg: Array, exp_avg_sq: Array, grad: Array, weight_format: WeightFormat) -> State:
    """A state whose arrays all begin one element after an aligned address."""
    weight, aux = master.copy(), None
    if weight_format is WeightFormat.BF16_REMAINDER:
        weight, aux = oracle.split_bf16(master)
    elif weight_format is not WeightFormat.F32:
        weight = oracle.to_f16(master) if weight_format is WeightFormat.F16_MASTER else oracle.to_bf16(master)
        aux = master.copy()
    arrays = (weight, aux, exp_avg, exp_avg_sq, grad)
    return State(*(None if a is None else np.concatenate([a[:1], a])[1:] for a in arrays))


def ordinary(numel: int, weight_format: WeightFormat, grad_dtype: GradDtype, seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    master, exp_avg, grad = (rng.standard_normal((3, numel)) * [[0.02], [1e-3], [1e-2]]).astype(np.float32)
    return make(master, exp_avg, np.square(exp_avg), as_grad(grad, grad_dtype), weight_format)


def as_grad(values: Array, dtype: GradDtype) -> Array:
    if dtype is GradDtype.F32:
        return values
    return oracle.to_bf16(values) if dtype is GradDtype.BF16 else oracle.to_f16(values)


def native(pool: ThreadPool, s: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    weight, aux, exp_avg, exp_avg_sq, grad = (0 if a is None else a.ctypes.data for a in s.arrays())
    numel = len(s.weight)
    kernels.adamw_update(pool, numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype, values)


def by_oracle(s: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    oracle.adamw_update(s.weight, weight_format, s.aux, s.exp_avg, s.exp_avg_sq, s.grad, grad_dtype, values)


def canonical(array: Array, is_bf16: bool) -> Array:
    """The bits, with one NaN for all: sign and payload of a NaN are not part of the contract."""
    numbers = oracle.from_bf16(array) if is_bf16 else array
    bits = array.view(f"u{array.itemsize}")
    return np.where(np.isnan(numbers), bits.dtype.type(-1 % 2 ** (8 * array.itemsize)), bits)


def assert_same(a: State, b: State) -> None:
    for field, x, y in zip(fields(State), a.arrays(), b.arrays(), strict=True):
        if x is None or y is None:
            assert x is y
            continue
        is_bf16 = field.name == "weight" and x.dtype == np.uint16
        np.testing.assert_array_equal(canonical(x, is_bf16), canonical(y, is_bf16), err_msg=field.name)


def check(pool: ThreadPool, state: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    expected = state.copy()
    native(pool, state, weight_format, grad_dtype, values)
    by_oracle(expected, weight_format, grad_dtype, values)
    assert_same(state, expected)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(2) as pool:
        yield pool


@FORMATS
@DTYPES
@DECOUPLED
def test_special_values(pool: ThreadPool, weight_format: WeightFormat, grad_dtype: GradDtype, decoupled: bool) -> None:
    grads = as_grad(SPECIAL_F32, grad_dtype)
    if grad_dtype is GradDtype.F16:
        grads = np.concatenate([SPECIAL_F16, SPECIAL_F16 | 0x8000]).view(np.float16)
    moments = np.array([0.0, -0.0, 1e-40, 0.5, np.inf, np.nan, 3e38], np.float32)
    master, grad, moment = (axis.ravel() for axis in np.meshgrid(SPECIAL_F32, grads, moments))
    for lr in (0.0, 1e-3):  # with a rate of 0 and no decay the weight must come back as it was
        values = scalars(lr, 0.9, 0.999, 1e-8, 0.1, step=2, decoupled=decoupled, grad_scale=0.7)
        check(pool, make(master, moment, np.abs(moment), grad, weight_format), weight_format, grad_dtype, values)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(WeightFormat),
    st.sampled_from(GradDtype),
    st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), min_size=1, max_size=80),
    st.floats(0, 1),
    st.floats(0, 0.9999),
    st.floats(0, 0.9999),
    st.floats(0, 0.5),
    st.integers(1, 10**6),
    st.booleans(),
    st.floats(-4, 4),
)
def test_any_bits_and_any_scalars(
    weight_format: WeightFormat,
    grad_dtype: GradDtype,
    bits: list[tuple[int, int, int, int]],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    grad_scale: float,
) -> None:
    master, exp_avg, exp_avg_sq, grad = np.array(bits, np.uint32).T.copy().view(np.float32)
    if grad_dtype is not GradDtype.F32:
        halves = (grad.view(np.uint32) >> 16).astype(np.uint16)
        grad = halves if grad_dtype is GradDtype.BF16 else halves.view(np.float16)
    values = scalars(lr, beta1, beta2, 1e-8, weight_decay, step, decoupled, grad_scale)
    with ThreadPool(1) as alone:
        check(alone, make(master, exp_avg, exp_avg_sq, grad, weight_format), weight_format, grad_dtype, values)


@FORMATS
@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_threads_and_odd_tails(weight_format: WeightFormat, grad_dtype: GradDtype, num_threads: int) -> None:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7, grad_scale=0.3)
    with ThreadPool(num_threads) as pool:
        for numel in (0, 1, 7, 31, 65536, 65537, 3 * 65536 + 13):
            check(pool, ordinary(numel, weight_format, grad_dtype), weight_format, grad_dtype, values)


@FORMATS
@DECOUPLED
def test_parts_make_the_whole(pool: ThreadPool, weight_format: WeightFormat, decoupled: bool) -> None:
    whole = ordinary(100_003, weight_format, GradDtype.BF16)
    parts = whole.copy()
    for step in (1, 2, 3):
        values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step, decoupled)
        native(pool, whole, weight_format, GradDtype.BF16, values)
        for begin, end in ((0, 1), (1, 18), (18, 70_001), (70_001, 100_003)):
            native(pool, parts.slice(slice(begin, end)), weight_format, GradDtype.BF16, values)
    assert_same(whole, parts)


@FORMATS
def test_denormals_survive_a_caller_who_flushes_them(weight_format: WeightFormat) -> None:
    tiny = (np.arange(1, 200_002, dtype=np.uint32) * 37 % 0x800000).view(np.float32)
    state = make(tiny, tiny, tiny, tiny, weight_format)
    expected = state.copy()
    values = scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=1)
    by_oracle(expected, weight_format, GradDtype.F32, values)
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush denormals")
    try:
        with ThreadPool(3) as pool:  # its workers inherit the mode
            native(pool, state, weight_format, GradDtype.F32, values)
        flushed = float(torch.tensor([1e-40]) * 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert_same(state, expected)
    assert flushed == 0.0, "the caller's own mode must be put back"


def test_calls_from_several_threads_take_turns(pool: ThreadPool) -> None:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1)
    states = [ordinary(200_000, WeightFormat.BF16_REMAINDER, GradDtype.BF16, seed) for seed in range(8)]
    expected = [state.copy() for state in states]
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda s: native(pool, s, WeightFormat.BF16_REMAINDER, GradDtype.BF16, values), states))
    for state, want in zip(states, expected, strict=True):
        by_oracle(want, WeightFormat.BF16_REMAINDER, GradDtype.BF16, values)
        assert_same(state, want)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_agrees_with_torch_over_50_steps(pool: ThreadPool, decoupled: bool) -> None:
    """No further from fp64 than torch's own fp32 is, within a factor of two, and as near to it as rounding allows."""
    numel, kind = 10_000, torch.optim.AdamW if decoupled else torch.optim.Adam
    state = ordinary(numel, WeightFormat.F32, GradDtype.F32)
    state.exp_avg[:], state.exp_avg_sq[:] = 0, 0
    single, double = (torch.from_numpy(state.weight.copy()).to(t) for t in (torch.float32, torch.float64))
    optimizers = [kind([p], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1) for p in (single, double)]
    rng = np.random.default_rng(1)
    for step in range(1, 51):
        state.grad = rng.standard_normal(numel).astype(np.float32)
        single.grad, double.grad = torch.from_numpy(state.grad), torch.from_numpy(state.grad).double()
        for optimizer in optimizers:
            optimizer.step()
        native(pool, state, WeightFormat.F32, GradDtype.F32, scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step, decoupled))
    exact = double.numpy()
    ours, torchs = np.abs(state.weight - exact).max(), np.abs(single.numpy() - exact).max()
    assert ours <= 2 * torchs
    np.testing.assert_allclose(state.weight, single.numpy(), rtol=1e-5, atol=5e-8)


@pytest.mark.parametrize("name", ["weight", "aux", "exp_avg", "exp_avg_sq", "grad"])
@pytest.mark.parametrize("address", [0, 4097])
def test_a_wrong_address_is_named(pool: ThreadPool, name: str, address: int) -> None:
    addresses = {"weight": 4096, "aux": 4096, "exp_avg": 4096, "exp_avg_sq": 4096, "grad": 4096, name: address}
    with pytest.raises(ValueError, match=rf"^{name} is at address {address}"):
        kernels.adamw_update(
            pool,
            1,
            addresses["weight"],
            WeightFormat.BF16_MASTER,
            addresses["aux"],
            addresses["exp_avg"],
            addresses["exp_avg_sq"],
            addresses["grad"],
            GradDtype.BF16,
            scalars(1e-3, 0.9, 0.999, 1e-8, 0, 1),
        )


def test_fp32_weights_have_no_aux(pool: ThreadPool) -> None:
    with pytest.raises(ValueError, match="aux must be 0"):
        kernels.adamw_update(
            pool,
            1,
            4096,
            WeightFormat.F32,
            4096,
            4096,
            4096,
            4096,
            GradDtype.F32,
            scalars(1e-3, 0.9, 0.999, 1e-8, 0, 1),
        )


@FORMATS
@DTYPES
def test_the_yardstick_changes_nothing(pool: ThreadPool, weight_format: WeightFormat, grad_dtype: GradDtype) -> None:
    state = ordinary(70_001, weight_format, grad_dtype)
    before = state.copy()
    weight, aux, exp_avg, exp_avg_sq, grad = (0 if a is None else a.ctypes.data for a in state.arrays())
    kernels.stream_like(pool, 70_001, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype)
    assert_same(state, before)
