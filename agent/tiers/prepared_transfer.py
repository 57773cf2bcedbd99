"""A transfer of a subgroup's state that a lane runs without the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.agent.tiers.transfers import no_op
from tidegate.kernels.dispatch import TransferTask


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A prepared transfer.

    task: the native work. completed: records that it has succeeded. When the task has failed, `fetch` or `flush` of the
    store go on from there: they take the task as their first attempt.
    """

    task: TransferTask
    completed: Callable[[], None] = no_op
