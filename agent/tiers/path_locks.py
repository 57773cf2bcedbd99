"""Locks between processes for exclusive use of a storage path, by one process at a time or by n.

The locks are an optimisation: paths are faster with them, and correct without them.

They are POSIX record locks on bytes of a node-local file, because the kernel releases them when a process dies and a
forked child inherits none. Record locks belong to the process. So each process opens the file once and never closes it
(closing any descriptor of the file would release the locks), and threads are counted here. While one thread of a
process has the lock, its other threads enter too, until another process waits.

Byte 0 is a turnstile (a lock that orders the waiting processes), bytes 1 to n are slots. A process that finds no free
slot blocks at the turnstile, where the kernel wakes processes in order of arrival. The process that holds the turnstile
polls for a free slot, and then passes the turnstile to the next process. Only that one process polls, and it finds
whichever of the n slots is freed first.

Measured with 8 processes on 2 cores, one slot, and 20 ms of work per turn: 0.5 ms pass from one holder to the next, all
waiting together takes 0.1 of a core, each process gets 24 to 27 turns, and the longest wait is 1.6 times the median. If
instead all processes poll (every 50 to 500 µs, with back-off), the time between holders is the same, waiting takes 0.25
of a core, processes get 16 to 36 turns, and the longest wait is 9 times the median, because the process that arrived
last polls fastest. Blocking on the slot too would save 0.2 ms a turn, but is not possible for more than one slot.
Without other processes, a lock costs 10 µs.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.agent.tiers.private_files import check_private, private_directory
from tidegate.errors import LocksUnusable

log = logging.getLogger("tidegate.tiers")

TURNSTILE: Final = 0
FIRST_SLOT: Final = 1
POLL_SECONDS: Final = (50e-6, 500e-6)
"""Shortest and longest pause, in seconds, of the process that polls for a free slot."""

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


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


def try_lock(fd: int, byte: int) -> bool:
    """Locks one byte for this process without waiting. False when another process has locked it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Releases this process's lock of one byte."""
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)


def locked_by_other(fd: int, byte: int) -> bool:
    """Whether another process has locked the byte. The call only queries the lock, so it blocks no other process."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _pass_turnstile(fd: int) -> None:
    """Blocks until this process has locked the turnstile: the byte of the file that orders waiting processes."""
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, TURNSTILE)
        except OSError as error:
            # The kernel treats a process as one thread: two threads that wait for different paths can look like a
            # deadlock.
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(POLL_SECONDS[1])
        else:
            return


class _LockFile:
    """One lock file within this process: counts the threads that hold the lock and those that wait. All `TierLocks` of
    the file share it."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        self.slots = slots
        self.warned = False
        self.reset()

    def reset(self) -> None:
        """Sets the initial state: no lock held, no thread waiting, file not open. Also called in a forked child."""
        self.lock = threading.Condition()
        self.fd: int | None = None
        self.slot: int | None = None
        self.inside = 0
        self.waiting = 0
        self.left = -math.inf
        """Time (monotonic clock, seconds) at which the last of the threads that held the lock released it."""
        self.turn = 0
        """Number of times that this process got the lock for all its waiting threads at once."""
        self.queue: threading.Thread | None = None

    def open(self) -> int:
        """Opens the lock file if necessary and returns its descriptor. If the file was deleted, a new one is created.
        Call it only while no thread of this process holds the lock or waits for it."""
        if self.fd is not None and os.fstat(self.fd).st_nlink:
            return self.fd
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None
        self.fd = _open_private(self.path)
        return self.fd

    def enter(self, timeout_seconds: float) -> bool:
        """Acquires the lock for the calling thread; False after a timeout. `timeout_seconds` limits the wait for other
        processes: it starts when no other thread of this process holds the lock."""
        with self.lock:
            try:
                return self._try_enter() or (timeout_seconds > 0 and self._wait(timeout_seconds))
            except (LocksUnusable, OSError) as error:
                # Locking worked at the start and fails now: training continues without it, more slowly.
                if not self.warned:
                    log.warning(
                        "Storage paths can no longer be locked, so processes of this node use them at the same time, "
                        "which is slower: %s",
                        error,
                    )
                self.warned = True
                return False

    def _wait(self, timeout_seconds: float) -> bool:
        """Waits until this process has the lock for all its waiting threads; False after `timeout_seconds`. If an
        exception ends the wait, the calling thread neither waits nor holds the lock."""
        if self.queue is None:
            self.queue = threading.Thread(target=self._queue_for_process, name="tidegate-locks", daemon=True)
            self.queue.start()
        turn = self.turn
        self.waiting += 1
        try:
            # The timeout does not include the time while other threads of this process hold the lock.
            self.lock.wait_for(lambda: self.turn != turn or not self.inside)
            self.lock.wait_for(lambda: self.turn != turn, timeout_seconds)
        except BaseException:
            if self.turn != turn:
                self.leave()
            raise
        finally:
            if self.turn == turn:
                self.waiting -= 1
        return self.turn != turn

    def leave(self) -> None:
        """Releases the lock for the calling thread. When no other thread of this process holds it, another process can
        get it: the slot (the locked byte of the lock file) is released."""
        with self.lock:
            self.inside -= 1
            if not self.inside:
                assert self.fd is not None
                assert self.slot is not None
                unlock(self.fd, self.slot)
                self.slot = None
                self.left = time.monotonic()
                self.lock.notify_all()

    def _try_enter(self) -> bool:
        """Acquires the lock if that needs no wait: other threads of this process hold it and no other process waits, or
        fewer than `slots` processes hold it and none waits. False if a wait is needed."""
        if self.inside:
            assert self.fd is not None
            if self.waiting or locked_by_other(self.fd, TURNSTILE):
                return False
        elif self.queue is not None:
            return False
        else:
            fd = self.open()
            if not try_lock(fd, TURNSTILE):
                return False
            self.slot = self._try_slots(fd)
            unlock(fd, TURNSTILE)
            if self.slot is None:
                return False
        self.inside += 1
        return True

    def _try_slots(self, fd: int) -> int | None:
        """Locks the first free slot and returns its byte; None when all are taken. The slots are bytes of the lock
        file, one for each process that may hold the lock at the same time."""
        return next((slot for slot in range(FIRST_SLOT, FIRST_SLOT + self.slots) if try_lock(fd, slot)), None)

    def _queue_for_process(self) -> None:
        """Body of the queue thread, which acquires the lock for this process: first the turnstile (the byte that orders
        waiting processes), then a slot. It is a separate thread because a blocked lock call cannot be cancelled. If no
        thread waits any longer when the turnstile is acquired, the turnstile is released at once. The queue thread ends
        when no thread of the process waits."""
        me = threading.current_thread()
        try:
            while self._has_waiters():
                assert self.fd is not None
                _pass_turnstile(self.fd)
                try:
                    self._take_turn(self.fd)
                finally:
                    unlock(self.fd, TURNSTILE)
        finally:
            with self.lock:
                if self.queue is me:
                    self.queue = None

    def _has_waiters(self) -> bool:
        """Waits until no thread of this process holds the lock, or no thread waits for it. Returns True if threads
        wait. Otherwise sets `queue` to None, because the calling queue thread ends, and returns False."""
        with self.lock:
            self.lock.wait_for(lambda: not self.inside or not self.waiting)
            if self.waiting:
                return True
            self.queue = None
            return False

    def _take_turn(self, fd: int) -> None:
        """Polls until one of the slots (bytes of the lock file) is free, and locks it. The caller holds the turnstile,
        so no other process polls. Ends without a slot when no thread of this process waits any longer."""
        pause = POLL_SECONDS[0]
        while True:
            with self.lock:
                if not self.waiting:
                    return
                self.slot = self._try_slots(fd)
                if self.slot is not None:
                    self.inside, self.waiting = self.waiting, 0
                    self.turn += 1
                    self.lock.notify_all()
                    return
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])


_files: dict[str, _LockFile] = {}
_files_lock = threading.Lock()


def _forget_locks_of_parent() -> None:
    """Resets all `_LockFile` objects in a forked child and closes their descriptors, because a child inherits no locks.
    Closing the child's descriptors does not release the parent's locks."""
    global _files_lock
    _files_lock = threading.Lock()
    for file in _files.values():
        if file.fd is not None:
            os.close(file.fd)
        file.reset()


os.register_at_fork(after_in_child=_forget_locks_of_parent)


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
        folder = private_directory(Path(os.path.abspath(directory)))
        self._file = _shared_file(folder / f"{device_key}.{operation}.lock", slots)

    @contextmanager
    def hold(self) -> Iterator[LockResult]:
        """Context manager that holds the lock for one operation on the path and yields the result. After a timeout the
        operation runs without the lock: `acquired` of the result is then False."""
        file, start = self._file, time.monotonic()
        acquired = file.enter(self.timeout_seconds)
        # While another thread of this process was inside, no other process had the path: that is no waiting time.
        waited = time.monotonic() - max(start, file.left)
        held = LockResult(waited, os.getpid() if acquired else None)
        if not acquired:
            with self._counting:
                self.timeouts += 1
        try:
            yield held
        finally:
            if held.acquired:
                file.leave()


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


def _shared_file(path: Path, slots: int) -> _LockFile:
    """The process's only `_LockFile` for `path`. The file is opened here, and its lock is queried as a test, so that
    problems appear at the start of the run."""
    with _files_lock:
        file = _files.setdefault(str(path), _LockFile(path, slots))
        with file.lock:
            file.slots = slots
            if file.fd is None:
                file.open()
        return file


def _open_private(path: Path) -> int:
    """Opens the lock file in its private directory, creates it if it is missing, and checks that it can be locked."""
    private_directory(path.parent)
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        check_private(path, os.fstat(fd))
        locked_by_other(fd, TURNSTILE)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        owner = f", it belongs to user {path.lstat().st_uid}" if os.path.lexists(path) else ""
        raise LocksUnusable(
            f"{path} cannot be locked: {error.strerror}{owner}. Remove it, or set XDG_RUNTIME_DIR to a directory of "
            "yours on this node."
        ) from error
    except LocksUnusable:
        os.close(fd)
        raise
    return fd
