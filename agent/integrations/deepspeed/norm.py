"""Gradient norm over all ranks and the clipping factor, rounded as in ZeRO-3.

ZeRO-3 sums squares in fp64 within a parameter and over the parameters of a subgroup, then continues in fp32: over
ranks, and over subgroups. Tidegate's fp64 sums may differ in the last bits; rounding to fp32 nearly always hides that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from tidegate.agent.parameters.shards import LocalShard
from tidegate.errors import ConfigError


class ZeroNorm:
    """Replaces `NormOverRanks`, with the same methods: a collective where parameters are sharded.

    subgroups: DeepSpeed's subgroup of each part. All parts are sharded over the same ranks.
    """

    def __init__(self, parts: Sequence[LocalShard], subgroups: Sequence[int]) -> None:
        self._subgroups = list(subgroups)
        self._groups, self._device = parts[0].groups, parts[0].device

    def extend(self, params: Sequence[torch.Tensor]) -> None:
        raise ConfigError("Under DeepSpeed parameters cannot be added once the engine exists: create a new engine.")

    def total(self, squares: Mapping[int, tuple[float, int]], skip: bool) -> tuple[float, bool]:
        """The square of the norm over all ranks (the norm is an fp32 number), and whether to skip the step: gradients
        are not finite, their norm does not fit in fp32, or a rank has `skip` set."""
        sums, bad = [0.0] * (max(self._subgroups) + 1), int(skip)
        for part in sorted(squares):
            square, count = squares[part]
            sums[self._subgroups[part]] += square
            bad += count
        found = torch.tensor([*sums, float(bad)], dtype=torch.float64).float().to(self._device)
        for group in self._groups:
            dist.all_reduce(found, group=group)
        *of_subgroups, any_bad = found.cpu()
        # One by one, as DeepSpeed does: torch's square root of a vector may differ from that of a number.
        norm = float(torch.linalg.vector_norm(torch.stack([one**0.5 for one in of_subgroups])))
        return norm**2, bool(any_bad) or not np.isfinite(norm)


def gradient_factor(norm: float, unscale: float, max_grad_norm: float | None) -> float:
    """Factor for the gradients, as in `unscale_and_clip_grads`. `norm`: norm of the scaled gradients. `max_grad_norm`:
    bound for the gradients after multiplication with `unscale`."""
    if max_grad_norm is None:
        return unscale
    one, loss_scale = np.float32(1), np.float32(1.0 / unscale)
    clip = (np.float32(norm) / loss_scale + np.float32(1e-6)) / np.float32(max_grad_norm)
    return float(one / (max(clip, one) * loss_scale))
