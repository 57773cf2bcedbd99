"""What the engine's results are held against: the oracle applied to whole parameters, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tidegate.agent.parameters.subgroups import format_of
from tidegate.kernels.adamw import oracle as adamw_oracle
from tidegate.kernels.adamw.scalars import scalars
from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat
from tidegate.rules.adamw import RULE

WEIGHT_DTYPES = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16))]
"""For tests that try each: with bf16 weights there is most to keep, a remainder and the moments."""
ARRAY_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor's elements as the oracle takes them (bf16 as its bits)."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(BITS_OF[tensor.dtype]).numpy().view(ARRAY_OF[tensor.dtype]).copy()


@dataclass
class PlainParam:
    format: WeightFormat
    grad: GradDtype
    weight: np.ndarray[Any, Any]
    aux: np.ndarray[Any, Any] | None
    exp_avg: np.ndarray[Any, Any]
    exp_avg_sq: np.ndarray[Any, Any]
    step: int = 0


@dataclass
class PlainAdamW:
    """AdamW by the oracle. `groups` are param groups as torch's, hyperparameters included."""

    groups: list[dict[str, Any]]
    max_grad_norm: float | None = None
    params: list[PlainParam] = field(default_factory=list)

    def __post_init__(self) -> None:
        for group in self.groups:
            for param in group["params"]:
                self.params.append(_fresh(param))

    def step(self, grads: list[torch.Tensor | None], loss_scale: float = 1.0) -> None:
        """`grads` in the order of the parameters of all groups, `loss_scale` times too large."""
        found = [None if g is None else array(g) for g in grads]
        sums = [oracle.sum_of_squares(g, p.grad) for p, g in zip(self.params, found, strict=True) if g is not None]
        if any(bad for _, bad in sums):
            return
        norm = sum((squares for squares, _ in sums), 0.0) ** 0.5
        scale = 1.0 / loss_scale
        if self.max_grad_norm is not None:
            scale *= float(oracle.clip_scale(norm / loss_scale, self.max_grad_norm))
        owners = [group for group in self.groups for _ in group["params"]]
        for param, grad, group in zip(self.params, found, owners, strict=True):
            if grad is None:
                continue
            param.step += 1
            chosen = scalars(
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                weight_decay=group["weight_decay"], step=param.step,
                grad_scale=-scale if group.get("maximize") else scale,
                decoupled=group.get("decoupled_weight_decay", True),
            )  # fmt: skip
            adamw_oracle.update(
                param.weight, param.format, param.aux, (param.exp_avg, param.exp_avg_sq), grad, param.grad, chosen
            )

    def add(self, group: dict[str, Any]) -> None:
        """A param group that comes later."""
        self.groups.append(group)
        self.params += [_fresh(param) for param in group["params"]]

    def same_weights(self, params: list[torch.nn.Parameter]) -> bool:
        return all(
            np.array_equal(mine.weight.view(np.uint8), array(theirs).view(np.uint8))
            for mine, theirs in zip(self.params, params, strict=True)
        )


def _fresh(param: torch.Tensor) -> PlainParam:
    weight, n, fmt = array(param), param.numel(), format_of(param, RULE)
    aux: np.ndarray[Any, Any] | None = None
    if fmt.weight is WeightFormat.BF16_REMAINDER:
        aux = np.zeros(n, np.int16)
    elif fmt.aux_bytes:
        aux = weight.astype(np.float32)
    return PlainParam(fmt.weight, fmt.grad, weight, aux, np.zeros(n, np.float32), np.zeros(n, np.float32))
