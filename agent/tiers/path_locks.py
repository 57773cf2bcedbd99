"""Exclusive use of a storage path by one process at a time, or n: a hint that makes paths faster, never a need.

POSIX record locks on bytes of a node-local file, because the kernel frees them at death and a forked child has none of
them. They belong to the process, so that two things must hold: the file is opened once per process and never closed
(closing any descriptor of it would drop the locks), and threads are counted here. A process in which one thread has
the path lets its other threads in too, until another process waits.

Byte 0 is a turnstile, bytes 1 to n are slots. Whoever finds no free slot blocks at the turnstile, where the kernel
wakes in order of arrival; the one that is through looks for a free slot, again and again, and then leaves the turnstile
to the next. Only that one process polls, which also finds whichever of n slots is freed first.

Measured with 8 processes on 2 cores and one slot, held for 20 ms each time: 0.5 ms from one holder to the next, 0.1 of
a core for all the waiting, turns 24 to 27, longest wait 1.6 times the median. When all of them poll (50 to 500 µs,
backing off): the same gap, 0.25 of a core, turns 16 to 36, longest wait 9 times the median, because whoever comes last
polls fastest. Blocking on the slot too saves 0.2 ms a turn but cannot wait for n of them. When nobody else is there, a
lock costs 10 µs.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.errors import LocksUnusable

log = logging.getLogger("tidegate.tiers")

TURNSTILE: Final = 0
FIRST_SLOT: Final = 1
POLL_SECONDS: Final = (50e-6, 500e-6)
"""Shortest and longest pause of the one process that looks for a free slot."""

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


def lock_directory() -> Path:
    """Where lock files lie: private to the user and local to the node. Processes exclude each other only where it is
    the same for all of them: set XDG_RUNTIME_DIR for every rank or for none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "tidegate") if runtime else Path(f"/tmp/tidegate-{os.geteuid()}")


def device_key(directory: str | os.PathLike[str]) -> str:
    """What two paths have in common when they share a device: the number of the file system that `directory` is on.
    A network file system has one for each mount; partitions of one disk have one each."""
    device = os.stat(directory).st_dev
    return f"{os.major(device)}-{os.minor(device)}"


def try_lock(fd: int, byte: int) -> bool:
    """Locks one byte for this process, unless another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)


def locked_by_other(fd: int, byte: int) -> bool:
    """Whether another process has the byte locked. Asks only: nobody meets a lock of ours meanwhile."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _pass_turnstile(fd: int) -> None:
    """Blocks until this process has the turnstile."""
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, TURNSTILE)
        except OSError as error:
            # The kernel sees a process as one thread: two that wait for different paths can look like a deadlock.
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(POLL_SECONDS[1])
        else:
            return


class _LockFile:
    """One lock file as this process uses it: who of its threads is in, who waits. Used by all `TierLocks` on it."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        self.slots = slots
        self.warned = False
        self.start_anew()

    def start_anew(self) -> None:
        """Nothing is held, nobody waits, the file is not open: at first, and in a forked child."""
        self.lock = threading.Condition()
        self.fd: int | None = None
        self.slot: int | None = None
        self.inside = 0
        self.waiting = 0
        self.left = -math.inf
        """When the last thread that was in went out."""
        self.turn = 0
        """Counts the times that all who waited were let in."""
        self.queue: threading.Thread | None = None

    def open(self) -> int:
        """The descriptor; a new file when someone cleaned up the old one. Nothing is held or waited for."""
        if self.fd is not None and os.fstat(self.fd).st_nlink:
            return self.fd
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None
        self.fd = _open_private(self.path)
        return self.fd

    def enter(self, timeout_seconds: float) -> bool:
        """Lets the calling thread in, at the latest `timeout_seconds` after all others of this process have gone out;
        False when that was too short."""
        with self.lock:
            try:
                return self._enter_now() or (timeout_seconds > 0 and self._wait(timeout_seconds))
            except (LocksUnusable, OSError) as error:
                # It worked at the start. Training goes on without, more slowly.
                if not self.warned:
                    log.warning("Going on without exclusive use of paths: %s", error)
                self.warned = True
                return False

    def _wait(self, timeout_seconds: float) -> bool:
        """Until all who wait are let in. What interrupts the wait leaves nothing behind."""
        if self.queue is None:
            self.queue = threading.Thread(target=self._stand_in_line, name="tidegate-locks", daemon=True)
            self.queue.start()
        turn = self.turn
        self.waiting += 1
        try:
            # Threads of this process that are in are not what the time is for.
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
        """The calling thread goes out; the last one frees the slot."""
        with self.lock:
            self.inside -= 1
            if not self.inside:
                assert self.fd is not None
                assert self.slot is not None
                unlock(self.fd, self.slot)
                self.slot = None
                self.left = time.monotonic()
                self.lock.notify_all()

    def _enter_now(self) -> bool:
        """Without waiting: beside threads that are in, while no other process waits; or through an open turnstile."""
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
        return next((slot for slot in range(FIRST_SLOT, FIRST_SLOT + self.slots) if try_lock(fd, slot)), None)

    def _stand_in_line(self) -> None:
        """The thread that waits for this process, because a blocked lock call cannot be given up: if its threads have
        stopped waiting when it succeeds, it gives the turn away. It ends when nobody waits."""
        me = threading.current_thread()
        try:
            while self._someone_waits():
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

    def _someone_waits(self) -> bool:
        """True when a thread waits and none is in; False, and the queue is gone, when none waits."""
        with self.lock:
            self.lock.wait_for(lambda: not self.inside or not self.waiting)
            if self.waiting:
                return True
            self.queue = None
            return False

    def _take_turn(self, fd: int) -> None:
        """With the turnstile: looks for a free slot until there is one, or nobody waits any longer."""
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
    """A forked child has none of its parent's locks. What it closes drops none of them."""
    global _files_lock
    _files_lock = threading.Lock()
    for file in _files.values():
        if file.fd is not None:
            os.close(file.fd)
        file.start_anew()


os.register_at_fork(after_in_child=_forget_locks_of_parent)


@dataclass(slots=True)
class Held:
    """What `TierLocks.hold` gives: whether the path is ours, or the wait for other processes took too long."""

    waited_seconds: float
    _process: int | None

    @property
    def acquired(self) -> bool:
        """False too in a child that was forked meanwhile."""
        return self._process == os.getpid()


class TierLocks:
    """Exclusive use of the device `device_key` across the processes of a user on this node.

    `slots` processes may use it at once; give all processes the same number. `operation` separates sets of slots: reads
    and writes that do not disturb each other have one each. Waiting for longer than `timeout_seconds` for other
    processes ends without the lock, and is counted. LocksUnusable when `directory` is not private or cannot lock.

    Threads may share it; a forked child may go on using it, and has nothing of what its parent holds.
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
            raise ValueError(f"slots is {slots}, the least is 1")
        if not 0 <= timeout_seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be from 0 to {threading.TIMEOUT_MAX:.0f}")
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
        """How often it was proceeded without the lock."""
        self._counting = threading.Lock()
        folder = _private_directory(Path(os.path.abspath(directory)))
        self._file = _shared_file(folder / f"{device_key}.{operation}.lock", slots)

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """For the duration of one operation on the path."""
        file, start = self._file, time.monotonic()
        acquired = file.enter(self.timeout_seconds)
        # As long as another thread of this process was in, nobody else had the path.
        waited = time.monotonic() - max(start, file.left)
        held = Held(waited, os.getpid() if acquired else None)
        if not acquired:
            with self._counting:
                self.timeouts += 1
        try:
            yield held
        finally:
            if held.acquired:
                file.leave()


def locks_of_path(name: str, key: str, slots: int) -> TierLocks | None:
    """Those of a storage path on the device `key`. None, with a warning, where there can be none: training goes on
    without exclusive use, more slowly."""
    try:
        return TierLocks(lock_directory(), key, slots)
    except LocksUnusable as error:
        log.warning("Going on without exclusive use of path %s: %s", name, error)
        return None


def _shared_file(path: Path, slots: int) -> _LockFile:
    """The one of this process. It must be lockable: better said at the start than at the first wait."""
    with _files_lock:
        file = _files.setdefault(str(path), _LockFile(path, slots))
        with file.lock:
            file.slots = slots
            if file.fd is None:
                file.open()
        return file


def _private_directory(directory: Path) -> Path:
    """The directory, made when it is missing; LocksUnusable when others could have put anything there."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise LocksUnusable(
            f"{directory}, for lock files, cannot be made: {error.strerror}. Set XDG_RUNTIME_DIR to a directory of "
            "yours on this node."
        ) from error
    _check_private(directory, found)
    return directory


def _open_private(path: Path) -> int:
    """A descriptor of the lock file, in its private directory; made when missing, and tried."""
    _private_directory(path.parent)
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _check_private(path, os.fstat(fd))
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


def _check_private(path: Path, found: os.stat_result) -> None:
    remedy = "Remove it, or set XDG_RUNTIME_DIR to a directory of yours on this node."
    if found.st_uid != os.geteuid():
        raise LocksUnusable(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()} who runs this. {remedy}")
    if stat.S_ISLNK(found.st_mode) or (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        what = "is a link" if stat.S_ISLNK(found.st_mode) else f"has mode {mode:04o}: others may use it"
        raise LocksUnusable(f"{path} {what}. {remedy}")
