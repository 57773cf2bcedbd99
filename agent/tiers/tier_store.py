"""All storage paths of a rank, with their speeds. They are the third level of memory, below device and host memory."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.file_path import PathSettings, StoragePath
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.prepared_transfer import PreparedTransfer
from tidegate.agent.tiers.state_file import StateKind, file_bytes
from tidegate.agent.tiers.transfers import Transfer, no_op
from tidegate.errors import BlockDamaged, DataTruncated, NoPathLeft, PathFailed, PathFull, PathUnusable, StateLost
from tidegate.kernels import WeightFormat
from tidegate.kernels.dispatch import TransferTask
from tidegate.logs import event
from tidegate.plan.ops import Residence
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION_BYTES: Final = 64 << 20
NO_LIMIT_BYTES: Final = 1 << 62
"""Value used as the free bytes of a path without a capacity limit."""
FORMAT_NUMBERS: Final = {fmt: number for number, fmt in enumerate(WeightFormat)}


class TierStore:
    """Storage paths of one rank. Lanes may call `fetch` and `flush` at any time. All other methods are called between
    steps."""

    def __init__(self, paths: Mapping[str, PathSettings | ObjectSettings], rank: int = 0) -> None:
        self.run_id = uuid.uuid4()
        self.rank = rank
        self.step = 0
        """Number of the present update: state that is flushed now is the state after this update."""
        self.paths: dict[str, StoragePath | ObjectPath] = {}
        # Calling `close` is optional: the finalizer removes the files when the store is garbage-collected or the
        # process ends.
        self._closed = weakref.finalize(self, _close, self.paths)
        self.retired: dict[str, str] = {}
        """Paths that failed permanently, with the reason. Nothing more is written to them."""
        self.last_checkpoint: str | None = None
        """The last complete checkpoint: it is named in the error when state is lost."""
        self._changing = threading.RLock()
        """Lock that is held while paths are retired or space is reserved, because several lanes may detect the failure
        of a path at once."""
        self._full: set[str] = set()
        """Paths that ran out of space although they reported enough free space. A path is removed from this set when a
        state file is removed from the path."""
        self._flushed_to: dict[int, str] = {}
        self._kinds: dict[int, StateKind] = {}
        self._largest: dict[str, int] = {}
        """Bytes of the largest state file that may have to be stored, by path."""
        try:
            for name, settings in paths.items():
                self.paths[name] = _path(name, settings, self.run_id, rank)
        except BaseException:
            self.close()
            raise
        self.speeds: dict[str, PathSpeeds] = {}
        """Present estimate of each path's speeds. In contrast, `ceilings` holds the speeds measured at the start,
        without other load."""
        self.ceilings: dict[str, PathSpeeds] = {}

    def add_subgroups(self, layouts: Sequence[Layout]) -> None:
        """Registers subgroups whose state may be stored on a path."""
        for layout in layouts:
            self._kinds[layout.id] = state_kind(layout, self.rank)
        for name in self.paths:
            self._largest[name] = max((self._file_bytes(name, kind) for kind in self._kinds.values()), default=1)

    def calibrate(self) -> None:
        """Measures the speed of each path. It transfers at most a quarter of the bytes that will be stored, so that a
        run with little state starts quickly."""
        stored = sum(kind.data_bytes for kind in self._kinds.values())
        for name, path in self.paths.items():
            self.speeds[name] = self.ceilings[name] = path.calibrate(min(CALIBRATION_BYTES, stored // 4))

    def capacity(self, held: Mapping[int, str]) -> dict[str, int]:
        """Number of subgroups that each path can hold, including those that it stores at present; 0 for a retired path.
        `held`: present path of each subgroup."""
        return {name: self._capacity_of(name, held, self._largest[name]) for name in self.paths}

    def _capacity_of(self, name: str, held: Mapping[int, str], largest: int) -> int:
        room = self._free_bytes(name) if name not in self.retired else 0
        if name in self.retired:  # `_free_bytes` retires a path whose directory is gone
            return 0
        # A subgroup that is assigned to the path but has no file there (it is in the host cache, or new) needs space
        # like any other.
        files = sum(where == name and s in self.paths[name].states for s, where in tuple(held.items()))
        return files if name in self._full else files + room // largest

    def _file_bytes(self, path: str, kind: StateKind) -> int:
        return file_bytes(kind.data_bytes, self.paths[path].settings.block_bytes)

    def retire(self, path: str, why: object) -> None:
        """Stops all writes to a path. State on the path can still be fetched while the path is readable; the next flush
        writes it to another path. `why`: reason, for the log."""
        with self._changing:
            if path in self.retired:
                return
            self.retired[path] = str(why)
            self.paths[path].take_no_more()
        logged = event("path_retired", path=path, reason=str(why))
        log.error("path %s is retired, it takes no more state: %s", path, why, extra=logged)

    def reserve(self, subgroup: int, path: str) -> None:
        """Creates the file of a subgroup on `path` with its space reserved. Does nothing if the file exists.

        PathFull or PathUnusable when the file cannot be created. `capacity` then reports less for this path, so that
        the caller can assign the subgroups again.
        """
        if subgroup in self.paths[path].states:
            return
        try:
            self.paths[path].make(self._kinds[subgroup])
        except PathFull as error:
            said = "path %s is full, so other paths or host memory take its further state: %s"
            log.warning(said, path, error, extra=event("path_full", path=path, reason=str(error)))
            self._full.add(path)
            raise
        except (PathUnusable, OSError) as error:
            self.retire(path, error)
            raise PathUnusable(f"Path {path} cannot hold the state of subgroup {subgroup}: {error}") from error

    def remove_other_copies(self, subgroup: int, residence: Residence) -> None:
        """Removes the subgroup's files from all paths but `residence`, where its state is now."""
        for name in self.paths:
            if name != residence:
                self._remove_copy(subgroup, name)

    def _remove_copy(self, subgroup: int, path: str) -> None:
        if subgroup in self.paths[path].states:
            self.paths[path].remove(subgroup)
            self._full.discard(path)

    def forget(self, subgroup: int) -> None:
        """Resets the subgroup's files to zeros, because other state is loaded next. Files on retired paths are
        removed."""
        for name, path in self.paths.items():
            if name in self.retired:
                self._remove_copy(subgroup, name)
            elif subgroup in path.states:
                path.forget(subgroup)

    def begin_plan(self) -> None:
        """Forgets the transfers that were prepared for the last plan, which has ended."""
        for path in self.paths.values():
            path.counters.prepared.clear()

    def prepare_fetch(self, path: str, subgroup: int, address: int) -> PreparedTransfer | None:
        """`fetch` as a task, which a lane runs without the interpreter; None if `fetch` must be called."""
        return self.paths[path].prepare_read(subgroup, address)

    def prepare_flush(self, path: str, subgroup: int, address: int) -> PreparedTransfer | None:
        """`flush` as a task, which a lane runs without the interpreter; None if `flush` must be called."""
        if path in self.retired:
            return None
        prepared = self.paths[path].prepare_write(subgroup, address, self.step)
        if prepared is None:
            return None

        def completed() -> None:
            prepared.completed()
            self._flushed_to[subgroup] = path

        return PreparedTransfer(prepared.task, completed)

    def fetch(
        self,
        path: str,
        subgroup: int,
        address: int,
        begun: Callable[[], None] = no_op,
        failed: TransferTask | None = None,
    ) -> Transfer:
        """Reads the subgroup's state into memory at `address`. StateLost when it cannot be read: there is no other
        copy. `begun`: called when all blocks are queued, and again at each retry. `failed`: the task of the first
        attempt, if a lane has run it (`prepare_fetch`)."""
        try:
            return self.paths[path].read(subgroup, address, begun, failed)
        except (PathFailed, BlockDamaged, DataTruncated) as error:
            if isinstance(error, PathFailed):
                self.retire(path, error)
            step = self.paths[path].states[subgroup].step
            raise StateLost(error, path, subgroup, step, self.last_checkpoint) from error

    def flush(
        self,
        path: str,
        subgroup: int,
        address: int,
        begun: Callable[[], None] = no_op,
        failed: TransferTask | None = None,
    ) -> Transfer:
        """Writes the subgroup's state to `path`. If that fails permanently, the path is retired, and the state is
        written to another path; `flushed_to` returns its name. `begun`: called when all blocks for `path` are queued.
        `failed`: the task of the first attempt, if a lane has run it (`prepare_flush`).

        NoPathLeft when no path accepts the state: then the only copy is at `address`.
        """
        start, why = time.monotonic(), self.retired.get(path, "")
        if not why:
            try:
                moved = self.paths[path].write(subgroup, address, self.step, begun, failed)
            except (PathFailed, PathFull, PathUnusable) as error:
                self.retire(path, error)
                why = str(error)
            else:
                self._flushed_to[subgroup] = path
                return moved
        moved = self._flush_elsewhere(path, subgroup, address, why)
        # In the timeline, time and bytes belong to the lane of the path that failed: see
        # `PathCounters.taken_over_bytes`.
        return replace(moved, start=start)

    def _flush_elsewhere(self, path: str, subgroup: int, address: int, why: str) -> Transfer:
        """Writes the state to another path, because `path` has failed for the reason `why`. Tries the path with the
        most free space first. NoPathLeft when no path accepts the state."""
        for name in self._reserved_elsewhere(subgroup):
            try:
                moved = self.paths[name].write(subgroup, address, self.step)
            except (PathFull, PathUnusable, PathFailed) as error:
                self.retire(name, error)
                self._remove_copy(subgroup, name)
                continue
            self._flushed_to[subgroup] = name
            self.paths[name].counters.count_taken_over(moved.nbytes)
            logged = event("path_took_over", path=name, subgroup=subgroup, instead_of=path)
            log.warning(
                "path %s stores the state of subgroup %d, because path %s could not store it",
                name, subgroup, path, extra=logged,
            )  # fmt: skip
            return moved
        free = max((self._free_bytes(name) for name in self.paths if name not in self.retired), default=0)
        raise NoPathLeft(why, path, subgroup, self.step, self._file_bytes(path, self._kinds[subgroup]), free)

    def _reserved_elsewhere(self, subgroup: int) -> Iterator[str]:
        """Yields the paths to which a subgroup's state can be written after its path failed, the one with the most free
        space first. The space is reserved on a path just before its name is yielded."""
        tried: set[str] = set()
        while True:
            with self._changing:
                others = self._with_space(subgroup, tried)
                if not others:
                    return
                tried.add(others[0])
                try:
                    self.reserve(subgroup, others[0])
                except (PathFull, PathUnusable):
                    continue
            yield others[0]

    def _with_space(self, subgroup: int, tried: Container[str]) -> list[str]:
        """Untried paths with enough free space for a subgroup, most free space first."""
        room = {name: self._free_bytes(name) for name in self.paths if name not in self.retired and name not in tried}
        kind = self._kinds[subgroup]
        fit = [n for n in room if subgroup in self.paths[n].states or room[n] >= self._file_bytes(n, kind)]
        return sorted(fit, key=lambda name: -room[name])

    def _free_bytes(self, path: str) -> int:
        try:
            free = self.paths[path].free_bytes
        except OSError as error:
            self.retire(path, f"{self.paths[path].settings.location}: {error.strerror}.")
            return 0
        return NO_LIMIT_BYTES if free is None else free

    def storage_path(self, path: str) -> StoragePath:
        """The storage path named `path`, which must store state in files. Checkpoints link or hold these files; the
        state in an object store is copied."""
        found = self.paths[path]
        assert isinstance(found, StoragePath), "objects cannot be linked"
        return found

    def flushed_to(self, subgroup: int) -> str:
        """The path that the last flush of the subgroup wrote to: the requested path, unless that failed."""
        return self._flushed_to[subgroup]

    def close(self) -> None:
        """Removes the state files and ends the threads of all paths. The files of a path with a transfer in progress
        are not removed: `tidegate doctor` finds them when the process has ended. Idempotent; does nothing in a forked
        child."""
        self._closed()


def _path(name: str, settings: PathSettings | ObjectSettings, run_id: uuid.UUID, rank: int) -> StoragePath | ObjectPath:
    if isinstance(settings, ObjectSettings):
        return ObjectPath(name, settings, run_id.hex, rank)
    return StoragePath(name, settings, run_id.hex, rank, run_id.bytes)


def _close(paths: Mapping[str, StoragePath | ObjectPath]) -> None:
    """Closes all paths. A path with a transfer in progress is left open, with a warning."""
    for name, path in paths.items():
        if path.busy:
            log.warning(
                "path %s: a transfer has not ended, so the files of the path are not removed; remove them later with "
                "`tidegate doctor`",
                name,
            )
        else:
            path.close()


def state_kind(layout: Layout, rank: int) -> StateKind:
    """Identity of the subgroup's state, as written in the header of its file."""
    form, rule = layout.format, layout.format.rule
    return StateKind(
        rule.stored_as, rank, layout.id, layout.numel, FORMAT_NUMBERS[form.weight], form.state_bytes, rule.tensors_text
    )
