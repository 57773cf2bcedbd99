"""Transfers of one storage path: running one, a record of each, and counters."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isnan
from typing import Final, Literal

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.interrupts import DelayInterrupt, wait_for_end
from tidegate.kernels import IoTicket
from tidegate.kernels.dispatch import TransferTask

Operation = Literal["read", "write"]

POLL_SECONDS: Final = 1.0
"""Interval at which a thread that waits for a transfer handles signals."""
MAX_MOVES: Final = 10_000
"""Maximum number of recent transfers that are kept for telemetry. Older ones are dropped if nothing reads them."""


def no_op() -> None:
    """Does nothing: the default of callbacks."""


def run_transfer(begin: Callable[[], IoTicket], begun: Callable[[], None] = no_op) -> IoTicket:
    """Starts a transfer with `begin`, calls `begun`, waits for the end of the transfer and returns its ticket. If an
    exception interrupts the wait, it is raised only after the threads have stopped using the file and the memory, so
    that the caller can close and free them."""
    process = os.getpid()
    with DelayInterrupt():  # outside a lane
        ticket = begin()
        try:
            begun()
            while not ticket.wait(POLL_SECONDS):
                pass  # lets Python handle signals
        except BaseException:  # a second Ctrl-C, or what another handler raises
            if os.getpid() == process:  # not in a child that a handler has forked
                with suppress(BaseException):
                    ticket.cancel()
                with suppress(BaseException):
                    wait_for_end(lambda: ticket.wait(POLL_SECONDS))
            raise
    return ticket


@dataclass(frozen=True, slots=True)
class Transfer(DoneEvent):
    """One read or write of a subgroup's state. `nbytes` is 0 where nothing had to be transferred. Start and end exclude
    the wait for the lock."""

    nbytes: int
    lock_wait_seconds: float
    is_whole: bool = True
    """False for the transfer of a part of a file: background checkpoints copy in parts."""


@dataclass(slots=True)
class PreparedMove:
    """A transfer that a lane runs without the interpreter, once in each plan for which it is prepared. counted: whether
    the counters include its run in the present plan."""

    operation: Operation
    task: TransferTask
    nbytes: int
    counted: bool = False


@dataclass
class PathCounters:
    """Counters of a path since the run began, by operation: `read`, `write`. Calibration is not counted."""

    retries: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    errors: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """Failed attempts, including those that were retried."""
    bytes: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """Bytes transferred, including padding."""
    lock_wait_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    moves: deque[tuple[str, Transfer]] = field(default_factory=lambda: deque(maxlen=MAX_MOVES))
    """The most recent transfers, each with its operation (`read` or `write`). Telemetry removes them when it samples
    the path at the end of a step."""
    taken_over_bytes: int = 0
    """Bytes written to this path in place of a failed path that the plan had named. In timelines these bytes and their
    seconds appear in the lane of the failed path."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Lock that protects the counters, because several threads update them: the threads of the path's two lanes, and
    the thread of a background checkpoint."""
    under_way: dict[object, tuple[str, float]] = field(default_factory=dict)
    """Operation and start time of each transfer that Python waits for."""

    prepared: list[PreparedMove] = field(default_factory=list)
    """The transfers of the present plan that lanes run without the interpreter."""

    @property
    def open_transfers(self) -> list[tuple[str, float]]:
        """Operation and start time (monotonic clock, seconds) of each transfer that has not ended, without the wait for
        the lock."""
        tasks = [(one.operation, one.task.since) for one in tuple(self.prepared)]
        return [*self.under_way.values(), *((operation, since) for operation, since in tasks if not isnan(since))]

    @contextmanager
    def in_progress(self, operation: str) -> Iterator[None]:
        """Records a transfer in `under_way` for the duration of one attempt, without the wait for the lock."""
        transfer = object()
        self.under_way[transfer] = (operation, time.monotonic())
        try:
            yield
        finally:
            del self.under_way[transfer]

    def count(self, operation: str, moved: Transfer) -> Transfer:
        """Adds a transfer to the counters and returns it."""
        with self._lock:
            self.bytes[operation] += moved.nbytes
            self.lock_wait_seconds[operation] += moved.lock_wait_seconds
            self.moves.append((operation, moved))
        return moved

    def count_retry(self, operation: str) -> None:
        with self._lock:
            self.retries[operation] += 1

    def count_error(self, operation: str) -> None:
        with self._lock:
            self.errors[operation] += 1

    def count_taken_over(self, nbytes: int) -> None:
        with self._lock:
            self.taken_over_bytes += nbytes
