"""The native update equals the oracle bit for bit, and torch within fp32 rounding."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.kernels.arithmetic.states import (
    State,
    assert_same,
    by_oracle,
    canonical,
    make,
    of,
    ordinary,
    run_of,
    special,
)
from tidegate import kernels
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat
from tidegate.kernels.adamw import native as adamw
from tidegate.kernels.adamw.scalars import Arithmetic, Scalars, scalars
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.deepspeed_adamw import oracle as deepspeed_oracle

FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
DTYPES = pytest.mark.parametrize("grad_dtype", list(GradDtype))
DECOUPLED = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
EVERY_ISA = pytest.mark.parametrize("isa", kernels.instruction_sets(), indirect=True)
# around a vector of 8, 16 and 32 elements, a block of 64, a task of the thread pool
NUMELS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 65535, 65536, 65537, 3 * 65536 + 13)
libm = ctypes.CDLL("libm.so.6")
libm.fmaf.argtypes, libm.fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
ROUND_UP, ROUND_TO_ZERO = 0x800, 0xC00  # of fenv.h on x86-64


def native(pool: ThreadPool, s: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    adamw.update(pool, run_of(s, weight_format, grad_dtype, values))


def check(pool: ThreadPool, state: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    expected = state.copy()
    native(pool, state, weight_format, grad_dtype, values)
    by_oracle(expected, weight_format, grad_dtype, values)
    assert_same(state, expected)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(2) as pool:
        yield pool


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.instruction_set()
    kernels.use_instruction_set(request.param)
    yield request.param
    kernels.use_instruction_set(before)


@EVERY_ISA
@FORMATS
@DTYPES
@DECOUPLED
@pytest.mark.parametrize("grad_scale", [1.0, 0.7, -1.0])
def test_special_values(
    isa: str,
    pool: ThreadPool,
    weight_format: WeightFormat,
    grad_dtype: GradDtype,
    decoupled: bool,
    grad_scale: float,
) -> None:
    state = special(weight_format, grad_dtype)
    for lr in (0.0, 1e-3):  # with a rate of 0 and no decay the weight must come back as it was
        values = scalars(lr, 0.9, 0.999, 1e-8, 0.1, step=2, decoupled=decoupled, grad_scale=grad_scale)
        check(pool, state.copy(), weight_format, grad_dtype, values)


@EVERY_ISA
@FORMATS
@DTYPES
@pytest.mark.parametrize("arithmetic", [Arithmetic.DEEPSPEED, Arithmetic.DEEPSPEED_TAIL])
def test_special_values_as_deepspeed_rounds(
    isa: str, pool: ThreadPool, weight_format: WeightFormat, grad_dtype: GradDtype, arithmetic: Arithmetic
) -> None:
    state = special(weight_format, grad_dtype)
    for decoupled, weight_decay in ((True, 0.1), (False, 0.1), (True, 0.0)):
        values = scalars(1e-3, 0.9, 0.999, 1e-8, weight_decay, step=2, decoupled=decoupled, grad_scale=0.7)
        check(pool, state.copy(), weight_format, grad_dtype, of(arithmetic, values))


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=40), st.booleans())
def test_the_oracles_fused_multiply_add_rounds_once(bits: list[tuple[int, int, int]], near: bool) -> None:
    a, b, c = np.array(bits, np.uint32).T.copy().view(np.float32)
    with np.errstate(all="ignore"):
        if near:  # the sum of numbers that nearly cancel, where rounding twice would show
            c = (-a * b * np.float32(1 + 2.0**-20)).astype(np.float32)
        found = deepspeed_oracle.fma(a, b, c)
    expected = np.array([libm.fmaf(*map(float, each)) for each in zip(a, b, c, strict=True)], np.float32)
    np.testing.assert_array_equal(canonical(found, False), canonical(expected, False))


@settings(max_examples=examples(250))
@given(
    st.sampled_from(kernels.instruction_sets()),
    st.sampled_from(WeightFormat),
    st.sampled_from(GradDtype),
    st.sampled_from(Arithmetic),
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
    isa: str,
    weight_format: WeightFormat,
    grad_dtype: GradDtype,
    arithmetic: Arithmetic,
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
    values = of(arithmetic, scalars(lr, beta1, beta2, 1e-8, weight_decay, step, decoupled, grad_scale))
    widest = kernels.instruction_set()
    kernels.use_instruction_set(isa)
    try:
        with ThreadPool(1) as alone:
            check(alone, make(master, exp_avg, exp_avg_sq, grad, weight_format), weight_format, grad_dtype, values)
    finally:
        kernels.use_instruction_set(widest)


@EVERY_ISA
@FORMATS
@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_threads_and_odd_tails(isa: str, weight_format: WeightFormat, grad_dtype: GradDtype, num_threads: int) -> None:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7, grad_scale=0.3)
    with ThreadPool(num_threads) as pool:
        for numel in NUMELS:
            arithmetic = Arithmetic(numel % len(Arithmetic))
            check(pool, ordinary(numel, weight_format, grad_dtype), weight_format, grad_dtype, of(arithmetic, values))


@FORMATS
@DECOUPLED
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_parts_make_the_whole(
    pool: ThreadPool, weight_format: WeightFormat, decoupled: bool, arithmetic: Arithmetic
) -> None:
    whole = ordinary(100_003, weight_format, GradDtype.BF16)
    parts = whole.copy()
    for step in (1, 2, 3):
        values = of(arithmetic, scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step, decoupled))
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


@EVERY_ISA
@FORMATS
@pytest.mark.parametrize("rounding", [ROUND_UP, ROUND_TO_ZERO])
def test_a_caller_who_rounds_otherwise_changes_nothing(isa: str, weight_format: WeightFormat, rounding: int) -> None:
    state = ordinary(200_001, weight_format, GradDtype.F32)
    expected = state.copy()
    values = scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=1)
    by_oracle(expected, weight_format, GradDtype.F32, values)
    assert libm.fesetround(rounding) == 0
    try:
        with ThreadPool(3) as pool:  # its workers inherit the mode
            native(pool, state, weight_format, GradDtype.F32, values)
        after = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert_same(state, expected)
    assert after == rounding, "the caller's own mode must be put back"


def test_calls_from_several_threads_take_turns(pool: ThreadPool) -> None:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1)
    states = [ordinary(200_000, WeightFormat.BF16_REMAINDER, GradDtype.BF16, seed) for seed in range(8)]
    expected = [state.copy() for state in states]
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda s: native(pool, s, WeightFormat.BF16_REMAINDER, GradDtype.BF16, values), states))
    for state, want in zip(states, expected, strict=True):
        by_oracle(want, WeightFormat.BF16_REMAINDER, GradDtype.BF16, values)
        assert_same(state, want)


def test_many_calls_from_several_threads_are_as_those_of_one() -> None:
    """Short jobs, so that one thread often comes while the job of another one is going on."""
    form, steps = (WeightFormat.F32, GradDtype.F32), 200
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1)
    states = [ordinary(40_000, *form, seed) for seed in range(4)]
    expected = [state.copy() for state in states]
    together = threading.Barrier(len(states))

    def update(pool: ThreadPool, state: State) -> None:
        together.wait()
        for _ in range(steps):
            native(pool, state, *form, values)

    pool = ThreadPool(3)
    threads = [threading.Thread(target=update, args=(pool, state), daemon=True) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call waits for ever"
    pool.close()
    with ThreadPool(1) as pool:
        for want in expected:
            for _ in range(steps):
                native(pool, want, *form, values)
    for state, want in zip(states, expected, strict=True):
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
        adamw.update(
            pool,
            Update(
                1,
                addresses["weight"],
                WeightFormat.BF16_MASTER,
                addresses["aux"],
                (addresses["exp_avg"], addresses["exp_avg_sq"]),
                addresses["grad"],
                GradDtype.BF16,
                scalars(1e-3, 0.9, 0.999, 1e-8, 0, 1),
            ),
        )


def test_fp32_weights_have_no_aux(pool: ThreadPool) -> None:
    values = scalars(1e-3, 0.9, 0.999, 1e-8, 0, 1)
    with pytest.raises(ValueError, match="aux must be 0"):
        adamw.update(pool, Update(1, 4096, WeightFormat.F32, 4096, (4096, 4096), 4096, GradDtype.F32, values))


@EVERY_ISA
@FORMATS
@DTYPES
def test_the_yardstick_changes_nothing(
    isa: str, pool: ThreadPool, weight_format: WeightFormat, grad_dtype: GradDtype
) -> None:
    state = ordinary(70_001, weight_format, grad_dtype)
    state.weight[:1000] = 0  # weights that do not agree with their masters are left alone too
    before = state.copy()
    run = run_of(state, weight_format, grad_dtype, scalars(1e-3, 0.9, 0.999, 1e-8, 0, 1))
    arrays = (run.weight, run.weight_format, run.aux, *run.tensors, run.grad, run.grad_dtype)
    kernels._native.stream_like(pool._native, run.numel, *arrays)
    assert_same(state, before)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    before = kernels.instruction_set()
    with pytest.raises(ValueError, match=r"'mmx' is not available on this CPU; available are baseline"):
        kernels.use_instruction_set("mmx")
    assert kernels.instruction_set() == before == kernels.instruction_sets()[-1]
