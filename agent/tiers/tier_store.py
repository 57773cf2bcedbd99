"""All storage paths of a rank together: the third level of memory, and what it knows of its speeds."""

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
from tidegate.agent.tiers.state_file import StateKind, file_bytes
from tidegate.agent.tiers.transfers import Transfer, nothing
from tidegate.errors import BlockDamaged, DataTruncated, NoPathLeft, PathFailed, PathFull, PathUnusable, StateLost
from tidegate.kernels import WeightFormat
from tidegate.logs import event
from tidegate.plan.ops import Residence
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION_BYTES: Final = 64 << 20
RULE: Final = "adamw"
UNBOUNDED: Final = 1 << 62
"""Free bytes of a path that has no bound."""
FORMATS: Final = {fmt: number for number, fmt in enumerate(WeightFormat)}


class TierStore:
    """Knows where the state of each subgroup lies. Lanes fetch and flush; everything else happens between steps."""

    def __init__(self, paths: Mapping[str, PathSettings | ObjectSettings], rank: int = 0) -> None:
        self.run_id = uuid.uuid4()
        self.rank = rank
        self.step = 0
        """Number of the update that writes now."""
        self.paths: dict[str, StoragePath | ObjectPath] = {}
        # Nobody has to call `close`: files go with the store that nobody holds, and with the process that ends.
        self._closed = weakref.finalize(self, _close, self.paths)
        self.retired: dict[str, str] = {}
        """Paths that failed for good, and why: nothing more is written there."""
        self.last_checkpoint: str | None = None
        """What to load when state is lost."""
        self._changing = threading.RLock()
        """Lanes may find at once that a path has failed, and that another one has room."""
        self._full: set[str] = set()
        """Paths with less room than they said, until something leaves them."""
        self._where: dict[int, str] = {}
        self._kinds: dict[int, StateKind] = {}
        self._largest: dict[str, int] = {}
        """Bytes of the largest file that each path may have to take."""
        try:
            for name, settings in paths.items():
                self.paths[name] = _path(name, settings, self.run_id, rank)
        except BaseException:
            self.close()
            raise
        self.speeds: dict[str, PathSpeeds] = {}
        """As far as is known now; `ceilings` are those measured at the start, with nothing else going on."""
        self.ceilings: dict[str, PathSpeeds] = {}

    def know(self, layouts: Sequence[Layout]) -> None:
        """Subgroups that may come to live on a path."""
        for layout in layouts:
            self._kinds[layout.id] = kind_of(layout, self.rank)
        for name in self.paths:
            self._largest[name] = max((self._file_bytes(name, kind) for kind in self._kinds.values()), default=1)

    def calibrate(self) -> None:
        """Measures each path, on no more than a share of what will be stored: a small state deserves no long start."""
        stored = sum(kind.data_bytes for kind in self._kinds.values())
        for name, path in self.paths.items():
            self.speeds[name] = self.ceilings[name] = path.calibrate(min(CALIBRATION_BYTES, stored // 4))

    def capacity(self, held: Mapping[int, str]) -> dict[str, int]:
        """How many subgroups each path can hold, with those that it holds already; a retired one holds none."""
        return {name: self._capacity_of(name, held, self._largest[name]) for name in self.paths}

    def _capacity_of(self, name: str, held: Mapping[int, str], largest: int) -> int:
        room = self._free_bytes(name) if name not in self.retired else 0
        if name in self.retired:
            return 0
        # What is assigned to it without a file (it is in the host cache, or new) needs room like any other.
        files = sum(where == name and self.paths[name].holds(s) for s, where in tuple(held.items()))
        return files if name in self._full else files + room // largest

    def _file_bytes(self, path: str, kind: StateKind) -> int:
        return file_bytes(kind.data_bytes, self.paths[path].settings.block_bytes)

    def retire(self, path: str, why: object) -> None:
        """It takes no more state. What it holds can be fetched, as long as it can be read, and goes elsewhere next time
        it is flushed."""
        with self._changing:
            if path in self.retired:
                return
            self.retired[path] = str(why)
        said = event("path_retired", path=path, reason=str(why))
        log.error("path %s is retired, it takes no more state: %s", path, why, extra=said)

    def reserve(self, subgroup: int, path: str) -> None:
        """Makes sure that its state can be written to `path`.

        PathFull or PathUnusable when it cannot; the path has less `capacity` then, so that one can divide anew.
        """
        if self.paths[path].holds(subgroup):
            return
        try:
            self.paths[path].make(self._kinds[subgroup])
        except PathFull as error:
            log.warning("path %s is full: %s", path, error, extra=event("path_full", path=path, reason=str(error)))
            self._full.add(path)
            raise
        except (PathUnusable, OSError) as error:
            self.retire(path, error)
            raise PathUnusable(f"Path {path} cannot take subgroup {subgroup}: {error}") from error

    def lives(self, subgroup: int, residence: Residence) -> None:
        """Its state is there now, and on no other path."""
        for name in self.paths:
            if name != residence:
                self._left(subgroup, name)

    def _left(self, subgroup: int, path: str) -> None:
        if self.paths[path].holds(subgroup):
            self.paths[path].remove(subgroup)
            self._full.discard(path)

    def forget(self, subgroup: int) -> None:
        """Its state is about to be replaced: files of it are zeros, and a retired path has none any more."""
        for name, path in self.paths.items():
            if name in self.retired:
                self._left(subgroup, name)
            elif path.holds(subgroup):
                path.forget(subgroup)

    def is_new(self, path: str, subgroup: int) -> bool:
        """Nothing was written yet: its state is zeros."""
        return self.paths[path].is_new(subgroup)

    def nbytes(self, subgroup: int) -> int:
        """Of its state."""
        return self._kinds[subgroup].data_bytes

    def fetch(self, path: str, subgroup: int, address: int, begun: Callable[[], None] = nothing) -> Transfer:
        """StateLost when it cannot be had: there is no other copy of it. `begun`: see `StoragePath.read`."""
        try:
            return self.paths[path].read(subgroup, address, begun)
        except (PathFailed, BlockDamaged, DataTruncated) as error:
            if isinstance(error, PathFailed):
                self.retire(path, error)
            step = self.paths[path].step_of(subgroup)
            raise StateLost(error, path, subgroup, step, self.last_checkpoint) from error

    def flush(self, path: str, subgroup: int, address: int, begun: Callable[[], None] = nothing) -> Transfer:
        """Stores its state on `path` or, where that fails for good, on another one: `where` tells. `begun`: see
        `StoragePath.read`.

        A path that failed is retired. NoPathLeft when none takes the state: then it is at `address` and nowhere else.
        """
        start, why = time.monotonic(), self.retired.get(path, "")
        if not why:
            try:
                moved = self.paths[path].write(subgroup, address, self.step, begun)
            except (PathFailed, PathFull) as error:
                self.retire(path, error)
                why = str(error)
            else:
                self._where[subgroup] = path
                return moved
        moved = self._flush_elsewhere(path, subgroup, address, why)
        # In the timeline this is the time of the lane that was at it, and so are the bytes: see `PathCounters`.
        return replace(moved, start=start)

    def _flush_elsewhere(self, path: str, subgroup: int, address: int, why: str) -> Transfer:
        """To the path with the most room that takes it."""
        for name in self._reserved_elsewhere(subgroup):
            try:
                moved = self.paths[name].write(subgroup, address, self.step)
            except (PathFull, PathUnusable, PathFailed) as error:
                self.retire(name, error)
                self._left(subgroup, name)
                continue
            self._where[subgroup] = name
            self.paths[name].counters.count_taken_over(moved.nbytes)
            said = event("path_took_over", path=name, subgroup=subgroup, instead_of=path)
            log.warning("path %s takes subgroup %d, which %s could not", name, subgroup, path, extra=said)
            return moved
        free = max((self._free_bytes(name) for name in self.paths if name not in self.retired), default=0)
        raise NoPathLeft(why, path, subgroup, self.step, self._file_bytes(path, self._kinds[subgroup]), free)

    def _reserved_elsewhere(self, subgroup: int) -> Iterator[str]:
        """Paths that may take it, the one with the most room first, each with space for it when it is its turn."""
        tried: set[str] = set()
        while True:
            with self._changing:
                others = self._with_room(subgroup, tried)
                if not others:
                    return
                tried.add(others[0])
                try:
                    self.reserve(subgroup, others[0])
                except (PathFull, PathUnusable):
                    continue
            yield others[0]

    def _with_room(self, subgroup: int, tried: Container[str]) -> list[str]:
        """Paths that may take it, the one with the most room first."""
        room = {name: self._free_bytes(name) for name in self.paths if name not in self.retired and name not in tried}
        kind = self._kinds[subgroup]
        fit = [n for n in room if self.paths[n].holds(subgroup) or room[n] >= self._file_bytes(n, kind)]
        return sorted(fit, key=lambda name: -room[name])

    def _free_bytes(self, path: str) -> int:
        try:
            free = self.paths[path].free_bytes
        except OSError as error:
            self.retire(path, f"{self.paths[path].settings.place}: {error.strerror}.")
            return 0
        return UNBOUNDED if free is None else free

    def files_of(self, path: str) -> StoragePath:
        """A path whose state is in files, which checkpoints link or hold. What is in an object store they copy."""
        found = self.paths[path]
        assert isinstance(found, StoragePath), "objects cannot be linked"
        return found

    def where(self, subgroup: int) -> str:
        """The path that its last flush reached: the one that was asked for, unless that failed."""
        return self._where[subgroup]

    def close(self) -> None:
        """Files of state are gone afterwards; but what the kernel is still at is left alone, and goes with the process.
        `tidegate doctor` finds its files later. Idempotent; nothing in a fork."""
        self._closed()


def _path(name: str, settings: PathSettings | ObjectSettings, run_id: uuid.UUID, rank: int) -> StoragePath | ObjectPath:
    if isinstance(settings, ObjectSettings):
        return ObjectPath(name, settings, run_id.hex, rank)
    return StoragePath(name, settings, run_id.hex, rank, run_id.bytes)


def _close(paths: Mapping[str, StoragePath | ObjectPath]) -> None:
    for name, path in paths.items():
        if path.busy:
            log.warning("path %s hangs: what lies there stays behind", name)
        else:
            path.close()


def kind_of(layout: Layout, rank: int) -> StateKind:
    """What a file of this subgroup's state says of itself."""
    return StateKind(RULE, rank, layout.id, layout.numel, FORMATS[layout.format.weight], layout.format.state_bytes)
