"""One storage path of a rank in an object store: an object for each block of a subgroup's state.

A flush writes new objects, under a name with its step that nothing else ever has, and only when all are there are the
old ones given up: an object is there whole or not at all, and nobody ever reads half of a flush. Checksums of blocks
are kept in memory while the run lives, as those of files are.
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
from tidegate.agent.tiers.object_blocks import BlockMover, Job, StoredBlocks, nothing
from tidegate.agent.tiers.object_client import Refused, bucket_key, connect, unusable
from tidegate.agent.tiers.object_scratch import ObjectScratch
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.path_locks import TierLocks, locks_of_path
from tidegate.agent.tiers.state_file import StateKind, num_blocks, padded_bytes
from tidegate.agent.tiers.transfers import Operation, PathCounters, Transfer
from tidegate.errors import PathFailed, PathFull
from tidegate.kernels import aligned_buffer, fill
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION: Final = "calibration"


@dataclass
class _State:
    """One subgroup. `step` is -1 while nothing was written: then its state is zeros."""

    kind: StateKind
    step: int = -1
    stored: StoredBlocks | None = None

    @property
    def data_bytes(self) -> int:
        """With the padding."""
        return padded_bytes(self.kind.data_bytes)


class ObjectPath:
    """Holds the state of subgroups in objects of its own, which go with it. Used as `StoragePath` is, whose public
    methods it has, but for those with which a checkpoint takes over files: what is here, checkpoints copy.

    Threads may read and write at once, each the state of other subgroups. Memory is given by address: whole pages,
    `padded_bytes` of the state.
    """

    def __init__(self, name: str, settings: ObjectSettings, run: str, rank: int) -> None:
        """ConfigError or PathUnusable when it cannot work."""
        self.name = name
        self.settings = settings
        self.counters = PathCounters()
        self._states: dict[int, _State] = {}
        self._numbers = itertools.count(1)
        """Of flushes: no key is used twice."""
        self._there: set[str] = set()
        """Keys that may exist."""
        self._closed = False
        self._locks: TierLocks | None = None
        if settings.lock_slots:
            self._locks = locks_of_path(name, bucket_key(settings), settings.lock_slots)
        client, self._brief = connect(settings)
        try:
            self._scratch = ObjectScratch(settings, self._brief, run, rank)
        except Refused as error:
            raise unusable(settings, error) from error
        self._mover = BlockMover(name, settings, client, self.counters)

    @property
    def busy(self) -> bool:
        """A transfer is in progress: it may still use the memory that it was given."""
        return self._mover.busy

    @property
    def lock_timeouts(self) -> int:
        """Waits for exclusive access that took too long."""
        return self._locks.timeouts if self._locks is not None else 0

    @property
    def capacity_bytes(self) -> int | None:
        """What the settings allow; None where they set no bound."""
        return self.settings.capacity_bytes or None

    @property
    def free_bytes(self) -> int | None:
        """What more state may take; None where no bound was set, as an object store knows none."""
        if not self.settings.capacity_bytes:
            return None
        used = sum(state.data_bytes for state in tuple(self._states.values()))
        return max(self.settings.capacity_bytes - used, 0)

    def holds(self, subgroup: int) -> bool:
        """It is counted as state of this path, written or not."""
        return subgroup in self._states

    def is_new(self, subgroup: int) -> bool:
        """Nothing was written of it."""
        return self._states[subgroup].step < 0

    def make(self, kind: StateKind) -> None:
        """Takes in a subgroup, with zeros for state. PathFull when that is beyond the capacity: the only room there is
        to reserve in an object store."""
        state, free = _State(kind), self.free_bytes
        if free is not None and state.data_bytes > free:
            raise PathFull(
                f"{self.settings.url} needs {state.data_bytes:,} bytes more, {free:,} of its capacity_bytes="
                f"{self.settings.capacity_bytes:,} are left. Set more, or give this path a smaller share.",
                state.data_bytes, free,
            )  # fmt: skip
        self._states[kind.subgroup] = state

    def remove(self, subgroup: int) -> None:
        """Its state lives elsewhere now."""
        self._give_up(self._states.pop(subgroup).stored)

    def forget(self, subgroup: int) -> None:
        """Its state is zeros again, whatever was written."""
        self._states[subgroup].step = -1

    def step_of(self, subgroup: int) -> int:
        """Number of the last update that was written; -1 before the first."""
        return self._states[subgroup].step

    def read(self, subgroup: int, address: int, begun: Callable[[], None] = nothing) -> Transfer:
        """Brings its state to `address`, verified. PathFailed, BlockDamaged or DataTruncated when it cannot be had.

        begun: called when all of it is queued: what another thread asks for from then on comes after it.
        """
        state = self._states[subgroup]
        if state.step < 0 or state.stored is None:
            start = time.monotonic()
            fill(address, 0, state.data_bytes)
            return Transfer(start, time.monotonic(), 0, 0.0)
        return self._move("read", state, state.step, self._mover.reads(state.stored, address, state.data_bytes), begun)

    def write(self, subgroup: int, address: int, step: int, begun: Callable[[], None] = nothing) -> Transfer:
        """Stores the state at `address`, as it is after the update number `step`. PathFailed when it cannot be; what
        was written before is still there then. `begun`: see `read`."""
        state = self._states[subgroup]
        fill(address + state.kind.data_bytes, 0, state.data_bytes - state.kind.data_bytes)
        stored = self._new(f"{subgroup:06d}-step{step}", state.data_bytes)
        try:
            moved = self._move("write", state, step, self._mover.writes(stored, address, state.data_bytes), begun)
        except BaseException:
            self._give_up(stored)
            raise
        before, state.step, state.stored = state.stored, step, stored
        self._give_up(before)
        return moved

    def _new(self, name: str, nbytes: int) -> StoredBlocks:
        checksums = np.zeros(num_blocks(nbytes, self.settings.block_bytes), np.uint32)
        stored = StoredBlocks(f"{self._scratch.folder}/{name}-{next(self._numbers)}", checksums)
        self._there.update(stored.keys)
        return stored

    def _give_up(self, stored: StoredBlocks | None) -> None:
        """Removes objects, while other things happen; what cannot be removed now goes at the end."""
        if stored is not None:
            self._mover.later(partial(self._delete, stored.keys))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            self._brief.delete(keys)
        except Refused as error:
            log.warning("path %s: %d objects stay behind until the end: %s", self.name, len(keys), error)
        else:
            self._there.difference_update(keys)

    # ---- moving

    def _move(
        self, operation: Operation, state: _State, step: int, jobs: Sequence[Job], begun: Callable[[], None]
    ) -> Transfer:
        """`step`: number of the update whose state it is."""
        with self._locks.hold() if self._locks is not None else nullcontext() as held:
            start = time.monotonic()
            try:
                with self.counters.going_on(operation):
                    self._mover.move(jobs, begun)
            except Refused as error:
                self._mover.count(operation, again=False)
                raise PathFailed(
                    f"Path {self.name} failed to {operation} the state of subgroup {state.kind.subgroup} after step "
                    f"{step}, {self.settings.url}: {error}.",
                    self.name, state.kind.subgroup, error.errno,
                ) from None  # fmt: skip
            end = time.monotonic()
        moved = Transfer(start, end, state.data_bytes, held.waited_seconds if held is not None else 0.0)
        return self._mover.moved(operation, moved)

    # ---- start and end

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """How fast it writes and reads `nbytes` alone, a first estimate that live rates replace, and whether both ways
        run at full speed at once."""
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        memory = aligned_buffer(size)
        here = memory.ctypes.data
        one, other = self._new(CALIBRATION, size), self._new(CALIBRATION, size)
        try:
            write = self._mover.seconds(self._mover.writes(one, here, size))
            read = self._mover.seconds(self._mover.reads(one, here, size))
            both = self._mover.seconds(self._mover.writes(other, here, size) + self._mover.reads(one, here, size))
        except Refused as error:
            raise unusable(self.settings, error) from error
        finally:
            self._give_up(one)
            self._give_up(other)
        return PathSpeeds(
            read_bytes_per_second=size / read,
            write_bytes_per_second=size / write,
            duplex=both < DUPLEX_SHARE * (read + write),
        )

    def close(self) -> None:
        """Its objects are gone afterwards. Idempotent; nothing in a fork."""
        if self._closed or self._scratch.owner.pid != os.getpid():
            return
        self._closed = True
        self._mover.close()
        self._states.clear()
        self._scratch.end()
        try:
            if self._there:
                self._brief.delete(sorted(self._there))
            self._scratch.remove()
        except Refused as error:
            log.warning("path %s: what lies in %s stays behind: %s", self.name, self._scratch.url, error)
