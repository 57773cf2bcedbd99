"""Locks between processes for exclusive use of a storage path, by one process at a time or by n.

The locks are an optimisation: paths are faster with them, and correct without them.

They are POSIX record locks on bytes of a node-local file, because the kernel releases them when a process dies and a
forked child inherits none. Record locks belong to the process. So each process opens the file once and never closes it
(closing any descriptor of the file would release the locks), and `PathLock` counts the threads of the process, those of
Python and native ones (`kernels/src/path_lock.cpp`). While one thread of a process has the lock, its other threads
enter too, until another process waits.

Byte 0 is a turnstile (a lock that orders the waiting processes), bytes 1 to n are slots. A process that finds no free
slot blocks at the turnstile, where the kernel wakes processes in order of arrival. The process that holds the turnstile
polls for a free slot, and then passes the turnstile to the next process. Only that one process polls, and it finds
whichever of the n slots is freed first.

Measured with 8 processes on 2 cores, one slot, and 20 ms of work per turn: 0.5 ms pass from one holder to the next, all
waiting together takes 0.1 of a core, each process gets 24 to 27 turns, and the longest wait is 1.6 times the median. If
instead all processes poll (every 50 to 500 µs, with back-off), the time between holders is the same, waiting takes 0.25
of a core, processes get 16 to 36 turns, and the longest wait is 9 times the median, because the process that arrived
last polls fastest. Blocking on the slot too would save 0.2 ms a turn, but is not possible for more than one slot.
Without other processes, a lock costs 6 to 7 µs in Python, and 3 µs in a native thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.errors import LocksUnusable
from tidegate.kernels import PathLock

log = logging.getLogger("tidegate.tiers")

_locks: Final[dict[str, PathLock]] = {}
"""This process's only lock object for each lock file."""
_warned: Final[set[PathLock]] = set()
"""Locks that failed after the start of the run, of which the log says so."""


def lock_directory() -> Path:
    """Directory of the lock files: private to the user and local to the node. Processes exclude each other only if they
    all use the same directory: set XDG_RUNTIME_DIR for every rank or for none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "tidegate") if runtime else Path(f"/tmp/tidegate-{os.geteuid()}")


def device_key(directory: str | os.PathLike[str]) -> str:
    """Lock key of a device: the number of the file system that `directory` is on. Two paths with the same key share a
    lock. A network file system has one number for each mount; each partition of a disk has its own."""
    device = os.stat(directory).st_dev
    return f"{os.major(device)}-{os.minor(device)}"


@dataclass(slots=True)
class LockResult:
    """Result of `TierLocks.hold`: whether the lock was acquired, and for how many seconds the caller waited for other
    processes."""

    waited_seconds: float
    _process: int | None

    @property
    def acquired(self) -> bool:
        """Whether the calling process holds the lock. False in a child that was forked while its parent held the
        lock."""
        return self._process == os.getpid()


class TierLocks:
    """Lock for exclusive use of the device `device_key` by processes of one user on this node.

    `slots` processes may use the device at once; give all processes the same number. Locks with different `operation`
    are independent, for example one lock for reads and one for writes that do not slow each other down. If the wait for
    other processes exceeds `timeout_seconds`, it ends without the lock and is counted in `timeouts`. LocksUnusable when
    `directory`, which holds the lock files, is not private to the user or its files cannot be locked.

    Threads may share an instance. A forked child may continue to use it, and holds none of the parent's locks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        device_key: str,
        slots: int = 1,
        timeout_seconds: float = 2.0,
        operation: str = "any",
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}, it must be at least 1")
        if not 0 <= timeout_seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be from 0 to {threading.TIMEOUT_MAX:.0f}")
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
        """Number of waits that timed out, after which the operation ran without the lock."""
        self._counting = threading.Lock()
        path = f"{os.path.abspath(directory)}/{device_key}.{operation}.lock"
        self.native = _locks.get(path) or _locks.setdefault(path, PathLock(path))
        """The lock itself, which all `TierLocks` of the file share, and native threads."""
        if failure := self.native.open(slots):
            raise LocksUnusable(failure)

    @contextmanager
    def hold(self) -> Iterator[LockResult]:
        """Context manager that holds the lock for one operation on the path and yields the result. After a timeout the
        operation runs without the lock: `acquired` of the result is then False."""
        entered = self.native.enter(self.timeout_seconds)
        held = LockResult(entered.waited_seconds, os.getpid() if entered.acquired else None)
        if not entered.acquired:
            self.count_timeout(entered.failure)
        try:
            yield held
        finally:
            if held.acquired:
                self.native.leave()

    def count_timeout(self, failure: str) -> None:
        """Counts an operation that ran without the lock. `failure`: why locking failed, empty after a timeout. Locking
        worked at the start of the run, so training continues without it, more slowly; the first failure is logged."""
        with self._counting:
            self.timeouts += 1
            if failure and self.native not in _warned:
                _warned.add(self.native)
                log.warning(
                    "Storage paths can no longer be locked, so processes of this node use them at the same time, "
                    "which is slower: %s",
                    failure,
                )


def locks_of_path(name: str, key: str, slots: int) -> TierLocks | None:
    """Creates the lock of a storage path on the device `key`. None, with a warning, where locks are not possible:
    training then runs without exclusive use, more slowly."""
    try:
        return TierLocks(lock_directory(), key, slots)
    except LocksUnusable as error:
        log.warning(
            "path %s cannot be locked, so processes of this node use it at the same time, which is slower: %s",
            name, error,
        )  # fmt: skip
        return None
