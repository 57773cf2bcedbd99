"""One storage path in a directory: a state file for each subgroup, moved by native threads with direct I/O."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tidegate.agent.tiers.disk_space import free_bytes, reserve
from tidegate.agent.tiers.file_moves import FileMover, StateFile, write_header
from tidegate.agent.tiers.object_settings import LEAST, check_whole_settings
from tidegate.agent.tiers.path_locks import device_key, locks_of_path
from tidegate.agent.tiers.prepared_transfer import PreparedTransfer
from tidegate.agent.tiers.scratch import Scratch
from tidegate.agent.tiers.state_file import Header, StateKind, file_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.state_reads import HeldFile
from tidegate.agent.tiers.transfers import PathCounters, Transfer, no_op
from tidegate.errors import ConfigError, PathUnusable
from tidegate.kernels import aligned_buffer, fill, open_direct
from tidegate.kernels.dispatch import TransferTask
from tidegate.knobs.setting_checks import check_directory, check_kind
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION_TRIES: Final = 2
DUPLEX_SHARE: Final = 0.75
"""Limit for the detection of duplex paths. A path counts as duplex if reading and writing at the same time takes less
than this share of the time of reading first and writing then: its two directions do not share the bandwidth."""


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Settings of one storage path in a directory.

    directory: an existing directory; state is stored in a folder of the run inside it (path; required).
    threads: blocks read at once, and blocks written at once, while the path does both; twice as many less one while it
        does only one of them; at least 1 (count; default 4).
    block_bytes: size of one transfer and of one checksummed block; a multiple of 4096 (bytes; default 1048576).
    lock_slots: processes of this node that may use the device at once (MLP-Offload, section 3.2); 0 for no exclusive
        access (count; default 1).
    capacity_bytes: limit for the state stored here; 0 for all free space (bytes; default 0).
    wear_bytes_per_day: bytes written a day beyond which attached runs log a warning, once; 0 for never. For a drive of
        4 TB that is rated for one full write a day: 4_000_000_000_000 (bytes a day; default 0).

    Raises ConfigError for a value of another type or out of these bounds.
    """

    directory: str | os.PathLike[str]
    threads: int = 4
    block_bytes: int = 1 << 20
    lock_slots: int = 1
    capacity_bytes: int = 0
    wear_bytes_per_day: int = 0

    def __post_init__(self) -> None:
        check_kind("directory", self.directory, (str, os.PathLike), "the path of one that exists", of=" of a path")
        if not os.fspath(self.directory):
            raise ConfigError(
                "directory='' of a path names no directory: give one that exists, '.' for the current directory."
            )
        check_directory("directory", self.directory, "for an object store write tidegate.ObjectSettings(url=…)")
        check_whole_settings(self, {**LEAST, "wear_bytes_per_day": 0})

    @property
    def location(self) -> str:
        """Location of the path as text for messages."""
        return os.fspath(self.directory)

    @property
    def place(self) -> str:
        """Deprecated name of `location`. It will be removed in the next version."""
        warnings.warn("PathSettings.place is deprecated: use PathSettings.location.", DeprecationWarning, stacklevel=2)
        return self.location


class StoragePath:
    """Storage path that keeps the state of subgroups in files of its own. `close` removes the files.

    Several threads may read and write at once, if each uses the state of another subgroup. The argument `address` of
    the methods points to page-aligned memory of the size of the state, rounded up to whole pages (`padded_bytes`).
    """

    def __init__(self, name: str, settings: PathSettings, run: str, rank: int, run_id: bytes) -> None:
        """Opens the path and creates its scratch directory. PathUnusable, PathFull or ScratchTaken when that fails."""
        self.name = name
        self.settings = settings
        self._run_id = run_id
        self.states: dict[int, StateFile] = {}
        """Files of the subgroups on this path, whose space is reserved."""
        self._spares: dict[int, StateFile] = {}
        """Spare file of each subgroup. The next flush writes to it if a checkpoint uses the present file."""
        self._scratch = Scratch.create(settings.directory, run, rank)
        try:
            slots, key = settings.lock_slots, device_key(settings.directory)
            locks = locks_of_path(name, key, slots) if slots else None
            self._mover = FileMover(name, settings.threads, settings.block_bytes, locks, PathCounters())
        except BaseException:
            self._scratch.close()
            raise
        self.lock_slots = slots if locks is not None else 0
        """Number of processes of this node that may use the path at once; 0 without exclusive access."""
        self._warned_buffered = False
        self._numbers = itertools.count(1)
        """Numbers in file names, so that no name is used twice."""

    @property
    def counters(self) -> PathCounters:
        """Counters of all transfers that have ended."""
        self._mover.count_finished()
        return self._mover.counters

    @property
    def busy(self) -> bool:
        """Whether a transfer is in progress. Until it has ended, the kernel may use its file and memory."""
        return self._mover.busy

    @property
    def lock_timeouts(self) -> int:
        """Number of waits for exclusive access that timed out."""
        return self._mover.locks.timeouts if self._mover.locks is not None else 0

    @property
    def capacity_bytes(self) -> int:
        """Size of the path's file system, or `capacity_bytes` of the settings if that is less. OSError when the
        directory is gone."""
        found = os.statvfs(self._scratch.directory)
        size = found.f_blocks * found.f_frsize
        return min(size, self.settings.capacity_bytes) if self.settings.capacity_bytes else size

    @property
    def free_bytes(self) -> int:
        """Bytes that are free for more state. OSError when the directory is gone."""
        free = free_bytes(self._scratch.directory)
        if self.settings.capacity_bytes:
            files = (*tuple(self.states.values()), *tuple(self._spares.values()))
            used = sum(self._file_bytes(file.kind) for file in files)
            free = min(free, self.settings.capacity_bytes - used)
        return max(free, 0)

    def _file_bytes(self, kind: StateKind) -> int:
        """Size in bytes of a state file of this kind with the block size of this path."""
        return file_bytes(kind.data_bytes, self.settings.block_bytes)

    def make(self, kind: StateKind) -> None:
        """Creates the file of a subgroup, with zeros as state and its space reserved. PathFull when the space is not
        there."""
        self.states[kind.subgroup] = self._new_file(kind)

    def _new_file(self, kind: StateKind, given: str | os.PathLike[str] | None = None) -> StateFile:
        """Creates a state file with its space reserved. With `given`, that existing file is renamed and becomes the
        state file."""
        name = str(self._scratch.directory / f"{kind.subgroup:06d}-{next(self._numbers)}.tide")
        if given is not None:
            os.rename(given, name)
        fd, direct = self._open(name)
        try:
            reserve(fd, self._file_bytes(kind))
        except BaseException:
            os.close(fd)
            os.unlink(name)
            raise
        blocks = num_blocks(padded_bytes(kind.data_bytes), self.settings.block_bytes)
        return StateFile(name, fd, kind, np.zeros(blocks, np.uint32), direct)

    def _open(self, name: str) -> tuple[int, bool]:
        """Opens a file for direct I/O, and creates it if it is missing. Returns its descriptor, and whether direct I/O
        is possible. Where it is not, the file goes through the page cache, and a warning is logged once."""
        try:
            fd, direct = open_direct(name, write=True, create=True)
        except OSError as error:
            raise PathUnusable(f"Path {self.name}: {name} cannot be created: {error.strerror}.") from error
        if not direct and not self._warned_buffered:
            self._warned_buffered = True
            log.warning("path %s: its file system has no direct I/O, so the page cache takes host memory", self.name)
        return fd, direct

    def remove(self, subgroup: int) -> None:
        """Removes the subgroup's files, when its state is stored elsewhere."""
        for files in (self.states, self._spares):
            if subgroup in files:
                self._discard(files.pop(subgroup))

    def _discard(self, file: StateFile) -> None:
        """Closes and deletes a file; an error is logged."""
        try:
            os.close(file.fd)
            os.unlink(file.name)
        except OSError as error:  # a path that fails, or a directory that was removed
            log.warning("path %s: %s cannot be removed: %s", self.name, file.name, error.strerror)

    def take_no_more(self) -> None:
        """Lets writes fail that were prepared and have not begun."""
        self._mover.stop.set()

    def forget(self, subgroup: int) -> None:
        """Resets the subgroup's state to zeros. State that was written before is no longer used."""
        self.states[subgroup].step = -1

    def read(
        self, subgroup: int, address: int, begun: Callable[[], None] = no_op, failed: TransferTask | None = None
    ) -> Transfer:
        """Reads the subgroup's state into memory at `address` and verifies it. PathFailed, BlockDamaged or
        DataTruncated when it cannot be read.

        begun: callback. It is called when all blocks of this transfer are queued, and again at each retry. Transfers
            that other threads request afterwards are queued behind this one.
        failed: the task of the first attempt, if a lane has run it (`prepare_read`).
        """
        file = self.states[subgroup]
        if file.step < 0:
            start = time.monotonic()
            fill(address, 0, file.data_bytes)
            return Transfer(start, time.monotonic(), 0, 0.0)
        return self._mover.read(file, address, begun, failed)

    def prepare_read(self, subgroup: int, address: int) -> PreparedTransfer | None:
        """The same as a task, which a lane runs without the interpreter; None if `read` must be called."""
        file = self.states[subgroup]
        move = self._mover.prepare("read", file, address) if file.step >= 0 else None
        return PreparedTransfer(move.task, partial(self._mover.count, move)) if move is not None else None

    def write(
        self,
        subgroup: int,
        address: int,
        step: int,
        begun: Callable[[], None] = no_op,
        failed: TransferTask | None = None,
    ) -> Transfer:
        """Writes the state at `address`, the state after update number `step`. PathFailed or PathFull when that fails;
        the previous content of the file is then lost. `begun`: called when all blocks are queued, and at each retry.
        `failed`: the task of the first attempt, if a lane has run it (`prepare_write`).

        A file without direct I/O goes through the page cache, which reports a write error only later, when the state
        may have left memory. So such a file is synchronised after each write: when this method returns, the data are on
        stable storage, and a write error is raised by the call that caused it.
        """
        file = self._file_to_write(subgroup)
        fill(address + file.kind.data_bytes, 0, file.data_bytes - file.kind.data_bytes)
        moved = self._mover.write(file, address, step, begun, failed)
        self._written(file, step)
        return moved

    def prepare_write(self, subgroup: int, address: int, step: int) -> PreparedTransfer | None:
        """The same as a task, which a lane runs without the interpreter; None if `write` must be called."""
        if self.states[subgroup].linked_header is not None and subgroup not in self._spares:
            return None
        file = self._file_to_write(subgroup)
        move = self._mover.prepare("write", file, address)
        if move is None:
            return None

        def completed() -> None:
            self._mover.count(move)
            self._written(file, step)

        return PreparedTransfer(move.task, completed)

    def _file_to_write(self, subgroup: int) -> StateFile:
        """The file for the subgroup's next state: the spare file if a checkpoint holds the present one. Creates the
        spare file if it is missing, because saving a checkpoint failed. Raises PathFull or PathUnusable."""
        if self.states[subgroup].linked_header is None:
            return self.states[subgroup]
        if subgroup not in self._spares:
            try:
                self.add_spare(subgroup)
            except OSError as error:
                raise PathUnusable(f"Path {self.name}: no new file can be created: {error.strerror}.") from error
        return self._spares[subgroup]

    def _written(self, file: StateFile, step: int) -> None:
        """Makes `file` the file of its subgroup. step: number of the update whose state it holds."""
        file.step, subgroup = step, file.kind.subgroup
        before = self.states[subgroup]
        if file is not before:
            self.states[subgroup] = self._spares.pop(subgroup)
            self._discard(before)

    # ---- checkpoints

    def linkable_bytes(self, subgroup: int, weights_checksum: int, device: int) -> int | None:
        """Size in bytes of the subgroup's file. None if a checkpoint cannot hard-link the file: nothing was written to
        it yet, the checkpoint is on another file system (with the device number `device`), or an earlier checkpoint
        holds the file, and its header has another checksum of the weights than `weights_checksum`."""
        file = self.states[subgroup]
        if file.step < 0 or os.fstat(file.fd).st_dev != device:
            return None
        if file.linked_header not in (None, self._header(file, weights_checksum)):
            return None  # an earlier checkpoint holds the file, with other weights in its header
        return os.fstat(file.fd).st_size

    def hard_link(self, subgroup: int, weights_checksum: int, target: str | os.PathLike[str]) -> bool:
        """Writes the file's header, with the checksum of the weights, and hard-links the file to `target`. Later
        flushes of the subgroup write to the spare file. The link is durable only after fsync. Returns False, and
        creates no link, if the file system refuses it. Call this method only if `linkable_bytes` returned a size."""
        file = self.states[subgroup]
        self._freeze(file, self._header(file, weights_checksum))
        try:
            os.link(file.name, target)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def hold(self, subgroup: int, weights_checksum: int) -> HeldFile:
        """Holds the subgroup's file for a checkpoint that copies it later: later flushes write to the spare file. The
        result has a second descriptor and a header with `weights_checksum`. Call it only for state that was written."""
        file = self.states[subgroup]
        header = self._header(file, weights_checksum)
        if file.linked_header is None:
            self._freeze(file, header)
        return HeldFile(file.name, os.dup(file.fd), header, self.counters)

    def _freeze(self, file: StateFile, header: Header) -> None:
        """Writes the header of a file and marks the file as held by a checkpoint: it is never written to again."""
        if file.linked_header is None:
            write_header(file.fd, header)
        file.linked_header = header

    def has_spare(self, subgroup: int) -> bool:
        """Whether the subgroup has a spare file."""
        return subgroup in self._spares

    def add_spare(self, subgroup: int, given: str | os.PathLike[str] | None = None) -> None:
        """Creates the spare file of a subgroup, to which flushes write once a checkpoint holds the present file.
        `given`: an existing file on this file system that is to become the spare file; None for a new file. PathFull
        when the space is not there."""
        self._spares[subgroup] = self._new_file(self.states[subgroup].kind, given)

    def _header(self, file: StateFile, weights_checksum: int) -> Header:
        """Header for the present content of a file."""
        return Header(
            kind=file.kind,
            run_id=self._run_id,
            step=max(file.step, 0),
            block_bytes=self.settings.block_bytes,
            block_checksums=tuple(map(int, file.checksums)),
            weights_checksum=weights_checksum,
        )

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """Measures the speed of writing and of reading `nbytes` without other load, and whether both directions run at
        full speed at once (duplex). Live rates replace this first estimate. It needs `nbytes` of free space.

        Each measurement is made twice and the faster result is used, because about one in ten is slowed by a stall of
        the device. A first estimate that is too low would last: live rates raise an estimate only after many steps, but
        lower it after two.
        """
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        name = str(self._scratch.directory / "calibration")
        memory, (fd, _) = aligned_buffer(size), self._open(name)
        try:
            reserve(fd, size)
            tries = [
                [self._mover.seconds(way, fd, memory) for way in (("write",), ("read",), ("write", "read"))]
                for _ in range(CALIBRATION_TRIES)
            ]
        except OSError as error:
            raise PathUnusable(
                f"Path {self.name} cannot reserve {size:,} bytes in {self.settings.directory}: {error.strerror}."
            ) from error
        finally:
            os.close(fd)
            os.unlink(name)
        write, read, both = map(min, zip(*tries, strict=True))
        return PathSpeeds(
            read_bytes_per_second=size / read,
            write_bytes_per_second=size / write,
            factors=DUPLEX if both < DUPLEX_SHARE * (read + write) else HALF_DUPLEX,
        )

    def close(self) -> None:
        """Removes the path's files and ends its threads. Idempotent; does nothing in a forked child."""
        if self._scratch.owner.pid != os.getpid():
            return
        self._mover.close()
        for files in (self.states, self._spares):
            for file in files.values():
                with suppress(OSError):  # close may report lost writes, but the files are deleted anyway
                    os.close(file.fd)
            files.clear()
        try:
            self._scratch.close()
        except OSError as error:
            log.warning(
                "path %s: files in %s cannot be removed: %s", self.name, self._scratch.directory, error.strerror
            )
