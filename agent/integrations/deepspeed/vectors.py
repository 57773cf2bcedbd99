"""Finds the vector width of DeepSpeed's cpu_adam, as compiled on this machine, by running one update."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import numpy as np
import torch

from tidegate.agent.devices.base import UpdateRun
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat
from tidegate.kernels.deepspeed_adamw import IMPLEMENTATION, of_tail
from tidegate.kernels.deepspeed_adamw.scalars import scalars

log = logging.getLogger("tidegate.deepspeed")

WIDTHS: Final = (16, 8, 4, 1, sys.maxsize)
"""Vector widths to try, in elements: 16 (AVX-512), 8 (AVX2), 4 (NEON), 1 (no element is left over), and a huge one for
code without vectors (all elements are left over)."""
NUMEL: Final = 127
"""Number of elements of the test update. It is not divisible by any of the vector widths except 1."""
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1


def vector_numel(cpu_adam: Any) -> int:
    """Number of elements that DeepSpeed's op `cpu_adam` updates at once. Elements left over at the end of an array are
    updated one by one, with another rounding (`Arithmetic.DEEPSPEED_TAIL`).

    The width is found by comparing the results of one update, because the op may have been built for another machine,
    or with a compiler that fuses operations differently. If no width gives the same bits, 1 is returned and a warning
    is logged: weights will be close to DeepSpeed's, but not equal.
    """
    wanted = _updated_by(cpu_adam)
    for width in WIDTHS:
        if all(map(torch.equal, _updated_here(width), wanted)):
            return width
    log.warning(
        "DeepSpeed's cpu_adam, as compiled on this machine, rounds in a way that Tidegate cannot reproduce: weights "
        "will be close to those of DeepSpeed's own offload, but not equal bit for bit. Training goes on."
    )
    return 1


def _arrays() -> list[torch.Tensor]:
    """Creates the weight, moments and gradient of the test update."""
    values = np.random.default_rng(0).standard_normal((4, NUMEL)).astype(np.float32)
    values[2] *= values[2]
    return list(torch.from_numpy(values))


def _updated_by(cpu_adam: Any) -> list[torch.Tensor]:
    """Runs the test update with DeepSpeed's op and returns the arrays."""
    number, found = -1, _arrays()
    weight, exp_avg, exp_avg_sq, grad = found
    cpu_adam.create_adam(number, LR, *BETAS, EPS, DECAY, True, False)
    cpu_adam.adam_update(number, 1, LR, *BETAS, EPS, DECAY, True, weight, grad, exp_avg, exp_avg_sq)
    cpu_adam.destroy_adam(number)
    return found


def _updated_here(width: int) -> list[torch.Tensor]:
    """Runs the test update with Tidegate's kernel and this vector width, and returns the arrays."""
    values, found, body = scalars(LR, BETAS, EPS, DECAY, step=1), _arrays(), NUMEL - NUMEL % width
    with ThreadPool(1) as pool:
        for part, chosen in ((slice(body), values), (slice(body, None), of_tail(values))):
            weight, *tensors, grad = (array[part].data_ptr() for array in found)
            numel = len(found[0][part])
            UpdateRun(
                numel, weight, WeightFormat.F32, 0, tuple(tensors), grad, GradDtype.F32, chosen, IMPLEMENTATION
            ).apply(pool)
    return found
