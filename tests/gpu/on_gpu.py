"""Training on a real GPU, held against the oracle on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tidegate
from tests.agent.engine.test_exactness import backward
from tests.agent.plain_adamw import PlainAdamW, array
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.timeline.timeline import Span

GPU = "cuda"


def params_on_gpu(shapes: list[tuple[tuple[int, ...], torch.dtype]], seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(GPU, dtype)) for shape, dtype in shapes]


def grads_on_gpu(params: list[torch.nn.Parameter], seed: int, some: bool = False) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randn(p.shape, generator=generator) * 3).to(GPU, p.dtype) for p in params]
    return [None if some and (seed + i) % 3 == 0 else grad for i, grad in enumerate(made)]


def oracle_of(optimizer: tidegate.AdamW) -> PlainAdamW:
    """The oracle with the same hyperparameters, from the weights as they are now."""
    groups: list[dict[str, Any]] = [
        {**group, "params": [p.detach().cpu() for p in group["params"]]} for group in optimizer.param_groups
    ]
    return PlainAdamW(groups, optimizer.max_grad_norm)


def assert_same_weights(plain: PlainAdamW, params: list[torch.nn.Parameter]) -> None:
    for i, (mine, theirs) in enumerate(zip(plain.params, params, strict=True)):
        ours = array(theirs.detach().cpu())
        np.testing.assert_array_equal(ours.view(np.uint8), mine.weight.view(np.uint8), err_msg=f"weight {i}")


class Run:
    """One optimizer on the GPU and its oracle."""

    def __init__(self, params: list[torch.nn.Parameter], max_grad_norm: float | None = None, **offload: Any) -> None:
        self.params = params
        self.optimizer = tidegate.AdamW(
            params, lr=0.02, max_grad_norm=max_grad_norm, offload=tidegate.Offload(**offload)
        )
        assert isinstance(self.optimizer.device, CudaDevice)
        self.plain = oracle_of(self.optimizer)
        self.spans: tuple[Span, ...] = ()
        self.optimizer.observers.append(lambda result, _: setattr(self, "spans", result.spans))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()

    def train(self, grads: list[torch.Tensor | None]) -> None:
        self.optimizer.zero_grad()
        backward(self.params, grads)
        self.optimizer.step()
        self.plain.step([None if grad is None else grad.cpu() for grad in grads])

    def check(self) -> None:
        self.optimizer.wait()
        assert_same_weights(self.plain, self.params)
