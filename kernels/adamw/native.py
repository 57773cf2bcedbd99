"""The native update of AdamW and Adam on host threads, in all of its arithmetics."""

from __future__ import annotations

from tidegate.kernels import ThreadPool, _native
from tidegate.kernels.arithmetic.device_calls import Update


def update(pool: ThreadPool, run: Update) -> None:
    """Updates the elements of a run in place; equals the oracle's update bit for bit."""
    exp_avg, exp_avg_sq = run.tensors
    _native.adamw_update(
        pool._native, run.numel, run.weight, run.weight_format, run.aux, exp_avg, exp_avg_sq, run.grad, run.grad_dtype,
        run.scalars.arithmetic, *run.scalars.as_tuple(),
    )  # fmt: skip
