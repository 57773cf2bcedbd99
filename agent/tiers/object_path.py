"""Storage path of a rank in an object store: one object for each block of a subgroup's state.

A flush writes new objects under unique names that contain the step. The old objects are deleted only when all new ones
exist. An object exists completely or not at all, so a partial flush is never read. As with files, checksums of blocks
are kept in memory while the run lives.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tidegate.agent.tiers.file_path import DUPLEX_SHARE
from tidegate.agent.tiers.object_blocks import BlockMover, Job, StoredBlocks
from tidegate.agent.tiers.object_client import RequestFailed, bucket_key, connect, path_unusable
from tidegate.agent.tiers.object_scratch import ObjectScratch
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.path_locks import locks_of_path
from tidegate.agent.tiers.state_file import StateKind, num_blocks, padded_bytes
from tidegate.agent.tiers.transfers import Operation, PathCounters, Transfer, no_op
from tidegate.errors import PathFailed, PathFull, PathUnusable, StateFileError
from tidegate.kernels import aligned_buffer, fill
from tidegate.kernels.dispatch import TransferTask
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION: Final = "calibration"


@dataclass
class _State:
    """State of one subgroup. `step`: number of the update whose state is stored; -1 before the first write, when the
    state is zeros. `stored`: the objects that hold the state."""

    kind: StateKind
    step: int = -1
    stored: StoredBlocks | None = None

    @property
    def data_bytes(self) -> int:
        """Bytes of the state, padding included."""
        return padded_bytes(self.kind.data_bytes)


class ObjectPath:
    """Storage path that keeps the state of subgroups in objects of its own. `close` deletes the objects.

    It has the public methods of `StoragePath` except those for hard links, held files and spare files: checkpoints copy
    state from an object store.

    Several threads may read and write at once, if each uses the state of another subgroup. The argument `address` of
    the methods points to page-aligned memory of the size of the state, rounded up to whole pages (`padded_bytes`).
    """

    def __init__(self, name: str, settings: ObjectSettings, run: str, rank: int) -> None:
        """Opens the path and writes its lease, an object that tells other machines that this rank is alive. ConfigError
        or PathUnusable when the path cannot be used."""
        self.name = name
        self.settings = settings
        self.counters = PathCounters()
        self.states: dict[int, _State] = {}
        """State of the subgroups that are assigned to this path. A subgroup may be assigned before it is written."""
        self._numbers = itertools.count(1)
        """Numbers in keys, so that no key is used twice."""
        self._stored_keys: set[str] = set()
        """Keys of all objects that may exist in the store: `close` deletes them."""
        self._closed = False
        slots = settings.lock_slots
        self._locks = locks_of_path(name, bucket_key(settings), slots) if slots else None
        self.lock_slots = slots if self._locks is not None else 0
        """Number of processes of this node that may use the path at once; 0 without exclusive access."""
        client, self._short_client = connect(settings)
        try:
            self._scratch = ObjectScratch(settings, self._short_client, run, rank)
        except RequestFailed as error:
            raise path_unusable(settings, error) from error
        self._mover = BlockMover(name, settings, client, self.counters)

    @property
    def busy(self) -> bool:
        """Whether a transfer is in progress. Its threads may use the caller's memory until the transfer has ended."""
        return bool(self.counters.under_way)

    @property
    def lock_timeouts(self) -> int:
        """Number of waits for exclusive access that timed out."""
        return self._locks.timeouts if self._locks is not None else 0

    @property
    def capacity_bytes(self) -> int | None:
        """Limit from the settings in bytes; None without a limit."""
        return self.settings.capacity_bytes or None

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are free for more state; None without a limit, because an object store reports no free space."""
        if not self.settings.capacity_bytes:
            return None
        used = sum(state.data_bytes for state in tuple(self.states.values()))
        return max(self.settings.capacity_bytes - used, 0)

    def make(self, kind: StateKind) -> None:
        """Assigns a subgroup to this path, with zeros as state. PathFull when the state does not fit in what
        `capacity_bytes` leaves free. No space is reserved in the object store itself."""
        state, free = _State(kind), self.free_bytes
        if free is not None and state.data_bytes > free:
            raise PathFull(
                f"{self.settings.url} needs {state.data_bytes:,} bytes more, but only {free:,} bytes are left of its "
                f"capacity_bytes={self.settings.capacity_bytes:,}. Raise capacity_bytes, or give "
                "this path a smaller share in tier_split.",
                state.data_bytes, free,
            )  # fmt: skip
        self.states[kind.subgroup] = state

    def remove(self, subgroup: int) -> None:
        """Removes the subgroup from this path and deletes its objects in the background. Call it when the state is
        stored elsewhere."""
        self._delete_later(self.states.pop(subgroup).stored)

    def forget(self, subgroup: int) -> None:
        """Resets the subgroup's state to zeros. State that was written before is no longer used."""
        self.states[subgroup].step = -1

    def prepare_read(self, subgroup: int, address: int) -> None:
        """None: objects are moved by threads of Python, so that `read` must be called."""

    def prepare_write(self, subgroup: int, address: int, step: int) -> None:
        """None: objects are moved by threads of Python, so that `write` must be called."""

    def take_no_more(self) -> None:
        """Does nothing: no write is prepared."""

    def read(
        self, subgroup: int, address: int, begun: Callable[[], None] = no_op, failed: TransferTask | None = None
    ) -> Transfer:
        """Reads the subgroup's state into memory at `address` and verifies it. PathFailed, BlockDamaged or
        DataTruncated when it cannot be read.

        begun: callback. It is called when all blocks of this transfer are queued. Transfers that other threads request
            afterwards are queued behind this one.
        failed: always None, because no read is prepared.
        """
        state = self.states[subgroup]
        if state.step < 0 or state.stored is None:
            start = time.monotonic()
            fill(address, 0, state.data_bytes)
            return Transfer(start, time.monotonic(), 0, 0.0)
        return self._move(
            "read", state, state.step, self._mover.read_jobs(state.stored, address, state.data_bytes), begun
        )

    def write(
        self,
        subgroup: int,
        address: int,
        step: int,
        begun: Callable[[], None] = no_op,
        failed: TransferTask | None = None,
    ) -> Transfer:
        """Writes the state at `address`, the state after update number `step`. PathFailed when that fails; the state
        written before is then still stored. `begun`: called when all blocks of this transfer are queued. `failed`:
        always None, because no write is prepared."""
        state = self.states[subgroup]
        fill(address + state.kind.data_bytes, 0, state.data_bytes - state.kind.data_bytes)
        stored = self._new(f"{subgroup:06d}-step{step}", state.data_bytes)
        try:
            moved = self._move("write", state, step, self._mover.write_jobs(stored, address, state.data_bytes), begun)
        except BaseException:
            self._delete_later(stored)
            raise
        before, state.step, state.stored = state.stored, step, stored
        self._delete_later(before)
        return moved

    def _new(self, name: str, nbytes: int) -> StoredBlocks:
        """Creates unique keys for `nbytes` of state, in a folder `<name>-<number>`. No object is written yet."""
        checksums = np.zeros(num_blocks(nbytes, self.settings.block_bytes), np.uint32)
        stored = StoredBlocks(f"{self._scratch.folder}/{name}-{next(self._numbers)}", checksums)
        self._stored_keys.update(stored.keys)
        return stored

    def _delete_later(self, stored: StoredBlocks | None) -> None:
        """Deletes objects in the background. Deletions that fail are tried again in `close`."""
        if stored is not None:
            self._mover.run_in_background(partial(self._delete, stored.keys))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            self._short_client.delete(keys)
        except RequestFailed as error:
            log.warning(
                "path %s: %d objects cannot be deleted now; Tidegate tries it again at the end of the run: %s",
                self.name, len(keys), error,
            )  # fmt: skip
        else:
            self._stored_keys.difference_update(keys)

    # ---- transfers

    def _move(
        self, operation: Operation, state: _State, step: int, jobs: Sequence[Job], begun: Callable[[], None]
    ) -> Transfer:
        """Runs the jobs of one read or write, under the path's lock if it has one. `step`: number of the update whose
        state is transferred, for error messages."""
        with self._locks.hold() if self._locks is not None else nullcontext() as held:
            start = time.monotonic()
            try:
                with self.counters.in_progress(operation):
                    self._mover.move(jobs, begun)
            except RequestFailed as error:
                self._mover.count_failure(operation, again=False)
                raise PathFailed(
                    f"Path {self.name} failed to {operation} the state of subgroup {state.kind.subgroup} after step "
                    f"{step} ({self.settings.url}): {error}.",
                    self.name, state.kind.subgroup, error.errno,
                ) from None  # fmt: skip
            end = time.monotonic()
        moved = Transfer(start, end, state.data_bytes, held.waited_seconds if held is not None else 0.0)
        return self.counters.count(operation, moved)

    # ---- start and end

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """Measures the speed of writing and reading `nbytes` without other load, and whether both directions run at
        full speed at once (duplex). Live rates replace this first estimate. Raises PathUnusable if a request fails, or
        if the store returns other data than were written."""
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        memory = aligned_buffer(size)
        address = memory.ctypes.data
        first, second = self._new(CALIBRATION, size), self._new(CALIBRATION, size)
        try:
            write = self._mover.seconds(self._mover.write_jobs(first, address, size))
            read = self._mover.seconds(self._mover.read_jobs(first, address, size))
            both = self._mover.seconds(
                self._mover.write_jobs(second, address, size) + self._mover.read_jobs(first, address, size)
            )
        except RequestFailed as error:
            raise path_unusable(self.settings, error) from error
        except StateFileError as error:
            raise PathUnusable(
                f"{self.settings.url} cannot be used: what was read from it is not what was written before. {error}"
            ) from error
        finally:
            self._delete_later(first)
            self._delete_later(second)
        return PathSpeeds(
            read_bytes_per_second=size / read,
            write_bytes_per_second=size / write,
            factors=DUPLEX if both < DUPLEX_SHARE * (read + write) else HALF_DUPLEX,
        )

    def close(self) -> None:
        """Deletes the path's objects and ends its threads. Idempotent; does nothing in a forked child."""
        if self._closed or self._scratch.owner.pid != os.getpid():
            return
        self._closed = True
        self._mover.close()
        self.states.clear()
        self._scratch.end()
        try:
            if self._stored_keys:
                self._short_client.delete(sorted(self._stored_keys))
            self._scratch.remove()
        except RequestFailed as error:
            log.warning(
                "path %s: objects in %s cannot be deleted: %s; `tidegate doctor` lists and removes them later",
                self.name,
                self._scratch.url,
                error,
            )
