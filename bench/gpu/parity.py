"""Stage: fifty steps of a small transformer. Its weights are compared bit for bit with the oracle, its losses with
those of torch.optim.AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tidegate
from bench.gpu.target import Target, run_stage
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import oracle
from tidegate.kernels.adamw.scalars import scalars

STEPS = 50
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def network(target: Target) -> torch.nn.Module:
    torch.manual_seed(0)
    width = target.sized(256, 16)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(target.device)


def train(target: Target, model: torch.nn.Module, optimizer: torch.optim.Optimizer, after: Any = None) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    width = target.sized(256, 16)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(8, target.sized(64, 8), width, generator=generator).to(target.device)
        optimizer.zero_grad()
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        if after is not None:
            after()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


class Oracle:
    """Copy of a model's parameters that the oracle updates with the same gradients, to compare the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = list(model.parameters())
        self.weights = [p.detach().cpu().numpy().ravel().copy() for p in self.params]
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        lr, (beta1, beta2), eps, decay = HYPER.values()
        values = scalars(lr, beta1, beta2, eps, decay, self.steps)
        for param, weight, (m, v) in zip(self.params, self.weights, self.moments, strict=True):
            grad = param.grad.detach().cpu().contiguous().numpy().ravel()
            oracle.update(weight, WeightFormat.F32, None, (m, v), grad, GradDtype.F32, values)

    def num_different(self) -> int:
        found = [p.detach().cpu().numpy().ravel().view(np.uint32) for p in self.params]
        return sum(int((a != b.view(np.uint32)).sum()) for a, b in zip(found, self.weights, strict=True))


def stage(target: Target) -> dict[str, Any]:
    ours, theirs = network(target), network(target)
    judge = Oracle(ours)
    offload = target.offload(stride=2.0, static_ratio=0.2, subgroup_numel=target.sized(100_000, 500))
    with tidegate.AdamW(ours.parameters(), **HYPER, offload=offload) as optimizer:
        losses = train(target, ours, optimizer, judge.step)
    reference = train(target, theirs, torch.optim.AdamW(theirs.parameters(), **HYPER))
    return {
        "steps": STEPS,
        "numel": sum(p.numel() for p in ours.parameters()),
        "weights_unlike_the_oracle": judge.num_different(),
        "last_loss": losses[-1],
        "last_loss_of_torch": reference[-1],
        "largest_relative_difference_of_losses": max(abs(a - b) / b for a, b in zip(losses, reference, strict=True)),
    }


if __name__ == "__main__":
    run_stage(stage)
