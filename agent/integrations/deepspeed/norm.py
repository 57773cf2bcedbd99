"""Gradient norm over all ranks and the clipping factor, rounded as in ZeRO-3.

ZeRO-3 sums squares in fp64 within a parameter and over the parameters of a subgroup. Then it continues in fp32, over
ranks and over subgroups. Tidegate's sums in fp64 may differ in the last bits, but are nearly always equal after
rounding to fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.errors import ConfigError


class ZeroNorm:
    """Computes the gradient norm over all ranks, rounded as in DeepSpeed. It is used in place of `NormOverRanks`. All
    ranks must call `total` in the same step if parameters are divided among ranks.

    parts: this rank's partitions of the parameters (`LocalShard`), all divided among the same ranks.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._subgroups = [part.subgroup for part in parts]
        self._groups, self._device = parts[0].groups, parts[0].device

    def extend(self, params: Sequence[torch.Tensor]) -> None:
        raise ConfigError("Under DeepSpeed parameters cannot be added once the engine exists: create a new engine.")

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]:
        """Returns two results for all ranks: the gradient norm, rounded to fp32 and then squared; and whether the step
        must be skipped, because gradients are not finite, the norm does not fit in fp32, or a rank has `skip` set.
        `squares`: sum of squares and number of non-finite elements of each part."""
        sums, bad = [0.0] * (max(self._subgroups) + 1), int(skip)
        for part in sorted(squares):
            square, count = squares[part]
            sums[self._subgroups[part]] += square
            bad += count
        found = torch.tensor([*sums, float(bad)], dtype=torch.float64, device="cpu").float().to(self._device)
        for group in self._groups:
            dist.all_reduce(found, group=group)
        *of_subgroups, any_bad = found.cpu()
        # One by one, as DeepSpeed does: torch's square root of a vector may differ from that of a number.
        norm = float(torch.linalg.vector_norm(torch.stack([one**0.5 for one in of_subgroups])))
        return norm**2, bool(any_bad) or not np.isfinite(norm)


def gradient_factor(norm: float, unscale: float, max_grad_norm: float | None) -> float:
    """Factor by which the gradients are multiplied, for unscaling and clipping, as in DeepSpeed's
    `unscale_and_clip_grads`. `norm`: norm of the gradients before unscaling. `unscale`: 1 / loss scale.
    `max_grad_norm`: limit for the norm after unscaling; None for no clipping."""
    if max_grad_norm is None:
        return unscale
    one, loss_scale = np.float32(1), np.float32(1.0 / unscale)
    clip = (np.float32(norm) / loss_scale + np.float32(1e-6)) / np.float32(max_grad_norm)
    return float(one / (max(clip, one) * loss_scale))


class ZeroRoundedOptimizer(Optimizer):
    """A `tidegate.Optimizer` that rounds as ZeRO-3 does: the gradient norm, and the factor for all gradients (loss
    scale and clipping). Its parameters are `LocalShard`s."""

    _norm_over_ranks = ZeroNorm
    _gradient_factor = staticmethod(gradient_factor)
