"""On a real GPU: whatever the plan, the dtype and the knobs, the weights equal the oracle's bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.agent.plain_adamw import array
from tests.gpu.on_gpu import GPU, Run, grads_on_gpu, params_on_gpu
from tidegate.agent.devices.base import GradRef
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.parameters.subgroups import GRAD_DTYPES
from tidegate.kernels.arithmetic import oracle
from tidegate.knobs.knobs import Knobs

pytestmark = pytest.mark.gpu

MODES: list[dict[str, Any]] = [
    {"gradients": "keep"},
    {"gradients": "release"},
    {"gradients": "release", "gradient_memory_bytes": 1},
    {"gradients": "keep", "policy": "sequential"},
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_oracle_while_knobs_change(mode: dict[str, Any], seed: int) -> None:
    choices = random.Random(seed)
    shapes = [((257, 131), d) for d in DTYPES] + [((7,), d) for d in DTYPES] + [((70_001,), d) for d in DTYPES]
    params = params_on_gpu(shapes, seed)
    offload = {"subgroup_numel": choices.choice((5_000, 40_000)), "num_slots": choices.choice((1, 2, 3)), **mode}
    with Run(params, choices.choice((None, 0.7)), stride=2.0, static_ratio=0.2, **offload) as run:
        for step in range(8):
            run.train(grads_on_gpu(params, 100 * seed + step, some=step % 3 == 2))
            run.check()
            knobs = (choices.choice(("off", 1.0, 1.7, 3.0)), choices.choice((0.0, 0.3, 1.0)))
            run.optimizer.apply_knobs(Knobs(stride=knobs[0], static_ratio=knobs[1]))


def test_equals_the_oracle_over_fifty_steps() -> None:
    params = params_on_gpu([((300, 301), torch.bfloat16), ((4_000,), torch.float32)])
    with Run(params, 1.0, stride=2.0, static_ratio=0.25, subgroup_numel=10_000) as run:
        for step in range(50):
            run.train(grads_on_gpu(params, step))
        run.check()


def test_equals_the_oracle_while_the_next_forward_runs() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(8))).to(GPU)
    other = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(8))).to(GPU)
    other.load_state_dict(model.state_dict())
    offload = tidegate.Offload(gradients="release", stride=2.0, subgroup_numel=20_000)
    losses: list[list[float]] = []
    for chosen, overlapped in ((model, True), (other, False)):
        with tidegate.AdamW(chosen.parameters(), lr=0.01, offload=offload) as optimizer:
            if overlapped:
                tidegate.overlap_forward(optimizer, chosen)
            losses.append(_train(chosen, optimizer))
    assert losses[0] == losses[1]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(20):
        loss = model(torch.randn(64, 200, generator=generator).to(GPU)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def test_a_state_goes_through_a_checkpoint() -> None:
    params = params_on_gpu([((30, 40), torch.bfloat16), ((999,), torch.float16)])
    with Run(params, stride=2.0, static_ratio=0.3, subgroup_numel=200) as run:
        run.train(grads_on_gpu(params, 0))
        state = run.optimizer.state_dict()
        assert all(t.device.type == "cpu" for own in state["state"].values() for t in own.values())
        run.optimizer.load_state_dict(state)
        run.train(grads_on_gpu(params, 1))
        run.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_oracles(dtype: torch.dtype) -> None:
    runtime = TorchCuda(torch.device(GPU))
    grads = [torch.randn(n, device=GPU).to(dtype) for n in (1, 17, 65_536, 65_537, 1_000_003)]
    grads[3][5] = float("inf")
    stream = runtime.new_stream("device")
    runtime.stream_waits(stream, runtime.record(runtime.current_stream()))
    read = runtime.norms([GradRef(g.data_ptr(), g.numel(), GRAD_DTYPES[dtype]) for g in grads], stream)
    runtime.host_waits(runtime.record(stream))
    assert read() == [oracle.sum_of_squares(array(g.cpu()), GRAD_DTYPES[dtype]) for g in grads]
    assert np.isfinite([squares for squares, _ in read()]).all()
