"""A transfer of a subgroup's state that a lane runs without the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidegate.agent.tiers.transfers import no_op
from tidegate.kernels.dispatch import TransferTask


class PreparedTransfer(NamedTuple):
    """A prepared transfer.

    task: the native work. completed: records that it has succeeded. When the task has failed, `fetch` or `flush` of the
    store go on from there: they take the task as their first attempt.
    """

    task: TransferTask
    completed: Callable[[], None] = no_op
