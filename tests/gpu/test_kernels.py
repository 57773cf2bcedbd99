"""The kernels on a real GPU: every format, ordinary and special values, against the oracle bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.on_gpu import GPU
from tests.kernels.arithmetic.states import State, assert_same, by_oracle, of, ordinary, special
from tidegate.agent.devices.base import UpdateRun
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.devices.gpu_kernels import load_kernels
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import IMPLEMENTATION
from tidegate.kernels.adamw.scalars import Arithmetic, scalars

pytestmark = pytest.mark.gpu

VALUES = [
    scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37),
    scalars(1e-2, 0.8, 0.95, 1e-6, 0.01, step=1, decoupled=False),
    scalars(1e-3, 0.9, 0.999, 0.0, 0.0, step=100_000),
    of(Arithmetic.DEEPSPEED, scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, grad_scale=0.37)),
    of(Arithmetic.DEEPSPEED_TAIL, scalars(1e-2, 0.8, 0.95, 1e-6, 0.01, step=1, decoupled=False)),
]


def test_triton_does_the_updates() -> None:
    assert load_kernels(torch.device(GPU), IMPLEMENTATION).__name__ == "tidegate.kernels.adamw.triton_adamw"  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight_format", list(WeightFormat))
@pytest.mark.parametrize("grad_dtype", list(GradDtype))
@pytest.mark.parametrize("which", range(len(VALUES)))
def test_equals_the_oracle(weight_format: WeightFormat, grad_dtype: GradDtype, which: int) -> None:
    runtime = TorchCuda(torch.device(GPU))
    states = [ordinary(numel, weight_format, grad_dtype, seed=numel) for numel in (1, 1023, 1024, 100_003)]
    for state in [*states, special(weight_format, grad_dtype)]:
        expected = state.copy()
        with np.errstate(all="ignore"):
            by_oracle(expected, weight_format, grad_dtype, VALUES[which])
        assert_same(on_gpu(runtime, state, weight_format, grad_dtype, which), expected)


def on_gpu(runtime: TorchCuda, state: State, weight_format: WeightFormat, grad_dtype: GradDtype, which: int) -> State:
    tensors = [None if a is None else torch.from_numpy(a.view(np.uint8).copy()).to(GPU) for a in state.arrays()]
    weight, aux, exp_avg, exp_avg_sq, grad = (0 if t is None else t.data_ptr() for t in tensors)
    run = UpdateRun(
        len(state.exp_avg),
        weight,
        weight_format,
        aux,
        (exp_avg, exp_avg_sq),
        grad,
        grad_dtype,
        VALUES[which],
        IMPLEMENTATION,
    )
    stream = runtime.new_stream("device")
    runtime.stream_waits(stream, runtime.record(runtime.current_stream()))
    runtime.update([run], stream)
    runtime.host_waits(runtime.record(stream))
    back: list[Any] = [
        None if t is None or a is None else t.cpu().numpy().view(a.dtype)
        for t, a in zip(tensors, state.arrays(), strict=True)
    ]
    return State(*back)
