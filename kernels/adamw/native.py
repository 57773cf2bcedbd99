"""The native update of AdamW and Adam on host threads, in all of its arithmetics."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.kernels import ThreadPool, _native
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.dispatch import GradientFactor, Task, TransferTask


def update(pool: ThreadPool, run: Update) -> None:
    """Updates the elements of a run in place; equals the oracle's update bit for bit."""
    exp_avg, exp_avg_sq = run.tensors
    _native.adamw_update(
        pool._native, run.numel, run.weight, run.weight_format, run.aux, exp_avg, exp_avg_sq, run.grad, run.grad_dtype,
        run.scalars.arithmetic, *run.scalars.as_tuple(),
    )  # fmt: skip


def task(pool: ThreadPool, runs: Sequence[Update], factor: GradientFactor, flush: TransferTask | None = None) -> Task:
    """The same update of these runs as a task. `factor` is multiplied with the gradient scale of their scalars. The
    update makes the checksums of the write `flush`, which follows it and moves the state of these runs."""
    parts = [
        (
            run.numel, run.weight, run.weight_format, run.aux, *run.tensors, run.grad, run.grad_dtype,
            run.scalars.arithmetic, run.scalars.as_tuple(),
        )
        for run in runs
    ]  # fmt: skip
    return _native.update_task(pool._native, parts, factor, flush)
