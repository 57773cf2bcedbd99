"""Writes a checkpoint: a state file for each subgroup, linked where the file is on the same file system, else copied;
at once, or held as it is and copied while training goes on (`drain`).

Nothing is changed in a checkpoint that is complete, and no older one goes before the new one is. What it costs in
space: files of expired checkpoints become the spare files of the paths, so that a path needs (1 + kept checkpoints)
times its share; one more while a checkpoint is drained.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tidegate.agent.checkpoints.background import Part, PendingCheckpoint, abandon
from tidegate.agent.checkpoints.manifest import (
    OPTIMIZER_FILE,
    Checkpoint,
    DamagedCheckpoint,
    Manifest,
    ParamForm,
    Stored,
    folder_name,
    forget_overtaken,
    remove_remains,
    retract,
    survey,
    sync,
)
from tidegate.agent.checkpoints.saved_files import check_saved
from tidegate.agent.checkpoints.snapshot import State, StateInFile, StateInMemory, write_state
from tidegate.agent.checkpoints.spare_files import Spares
from tidegate.agent.checkpoints.writer_lock import Writing
from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.engine.engine import Engine
from tidegate.agent.parameters.subgroups import Layout, Segment, flat
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.state_file import padded_bytes
from tidegate.agent.tiers.tier_store import RULE, TierStore, kind_of
from tidegate.errors import CheckpointFailed, ConfigError, PathUnusable
from tidegate.kernels import IoPool, aligned_buffer, crc32c, fill
from tidegate.plan.ops import is_path

log = logging.getLogger("tidegate.tiers")

THREADS: Final = 4
AUTO_MEMORY_SHARE: Final = 0.5
"""Of the host memory that is free, for copies of state that is not on a path."""

SaveAlso = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint is made of. `optimizer`: what is small, and can be loaded as weights only; `step`: updates;
    `writing`: who writes it."""

    engine: Engine
    params: Sequence[torch.Tensor]
    optimizer: Mapping[str, Any]
    step: int
    writing: Writing


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint goes. `keep`: so many of the newest complete ones stay."""

    directory: str | os.PathLike[str]
    keep: int = 1
    save_also: SaveAlso | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} is out of range: at least 1.")


def save(contents: Contents, target: Target, ranks: Ranks) -> Checkpoint:
    """Writes a checkpoint and, when it is complete, removes all but the newest.

    PathFull when there is no room, CheckpointTaken when another run or optimizer writes there, CheckpointFailed when it
    cannot be written; then the others are as they were.
    """
    return _Writer(contents, target, ranks).write()


def begin(contents: Contents, target: Target, ranks: Ranks, memory_bytes: int | None) -> PendingCheckpoint:
    """As `save`, but returns when all is linked or held: the rest is drained. `memory_bytes`: for copies of state that
    is not on a path, in host memory; None for half of what is free. What does not fit is written first."""
    if memory_bytes is not None and memory_bytes < 0:
        raise ConfigError(f"memory_bytes={memory_bytes} is out of range: at least 0.")
    writer = _Writer(contents, target, ranks)
    ways = writer.ways(int(AUTO_MEMORY_SHARE * host_available_bytes()) if memory_bytes is None else memory_bytes)
    if ranks.all_true(not (ways.held or ways.in_memory)):
        return PendingCheckpoint.complete(writer.write())
    return writer.begin(ways)


def weights_checksum(params: Sequence[torch.Tensor], segments: Sequence[Segment]) -> int:
    """The CRC-32C of the weights of one subgroup."""
    found = 0
    for s in segments:
        weights = flat(params[s.param])[s.offset : s.offset + s.numel].cpu()
        found = crc32c(weights.data_ptr(), weights.numel() * weights.element_size(), found)
    return found


@dataclass(frozen=True, slots=True)
class _Ways:
    """Which subgroups wait for the drain: held in the file that they are in, or as a copy in memory. The others are
    linked or copied at once."""

    held: frozenset[int] = frozenset()
    in_memory: frozenset[int] = frozenset()


class _Writer:
    """One rank's part of one checkpoint."""

    def __init__(self, contents: Contents, target: Target, ranks: Ranks) -> None:
        self._contents, self._ranks, self._save_also = contents, ranks, target.save_also
        self._engine, self._store = contents.engine, contents.engine.store
        self._run_id = self._store.run_id if self._store is not None else uuid.uuid4()
        self._base = Path(os.path.abspath(target.directory))
        with _agreed(ranks, self._base), _failed_on_error(self._base):
            self._base.mkdir(parents=True, exist_ok=True)
            if ranks.rank == 0:
                contents.writing.take(self._base)
        with _agreed(ranks, self._base), _failed_on_error(self._base):
            complete, damaged = survey(self._base, ranks.rank)
            forget_overtaken(self._base, complete, damaged, ranks.rank)
            remove_remains(self._base, ranks.rank)
        self._expiring = complete[target.keep - 1 :]
        """What goes when it is complete."""
        name, self._attempt, self._number = ranks.broadcast_from_first(_next(contents.step, complete, damaged))
        self._directory = self._base / name
        self._folder = self._directory / folder_name(ranks.rank, self._attempt)
        with _agreed(ranks, self._directory):
            self._sums = [weights_checksum(contents.params, layout.segments) for layout in self._engine.layouts]
            self._linkable = self._find_linkable()
            """Bytes of the files that can be linked, by subgroup."""

    def write(self) -> Checkpoint:
        """Everything, now."""
        spares = Spares(self._engine, self._ranks.rank, self._expiring)
        with _agreed(self._ranks, self._directory), _abandoned_on_error(self._folder):
            made = self._part(spares, _Ways()).publish()
        try:
            _retire(self._base, self._expiring, self._store, made, spares)
        except OSError as error:
            log.warning("checkpoint %s is complete, but older ones stay behind: %s", self._directory, error)
        return made

    def begin(self, ways: _Ways) -> PendingCheckpoint:
        """What has to be now; the rest is drained."""
        # Flushes may come before it is complete: until then no expiring checkpoint gives files.
        spares = Spares(self._engine, self._ranks.rank, ())
        store = weakref.ref(self._store) if self._store is not None else _nothing
        base, expiring = self._base, self._expiring
        with _abandoned_on_error(self._folder), ExitStack() as on_error:
            with _agreed(self._ranks, self._directory):
                part = self._part(spares, ways)
                on_error.callback(part.let_go)
            pending = PendingCheckpoint(
                part, _updating(self._engine), lambda made: _retire(base, expiring, store(), made), self._ranks
            )
            pending.start()
            on_error.pop_all()
        return pending

    def ways(self, memory_bytes: int) -> _Ways:
        """What can wait."""
        held, in_memory = set(), set()
        for layout in self._engine.layouts:
            if layout.id in self._linkable:
                continue
            path = self._path(layout)
            if path is not None and not path.is_new(layout.id):
                held.add(layout.id)
                continue
            nbytes = padded_bytes(kind_of(layout, self._ranks.rank).data_bytes)
            if nbytes <= memory_bytes:
                memory_bytes -= nbytes
                in_memory.add(layout.id)
        return _Ways(frozenset(held), frozenset(in_memory))

    def _path(self, layout: Layout) -> StoragePath | None:
        """Where its state lives, if that is a path with files. What is in an object store is copied."""
        lives = self._engine.memory.residence[layout.id]
        path = self._store.paths[lives] if self._store is not None and is_path(lives) else None
        return path if isinstance(path, StoragePath) else None

    def _find_linkable(self) -> dict[int, int]:
        found, device = {}, self._base.stat().st_dev
        for layout in self._engine.layouts:
            path = self._path(layout)
            nbytes = path.link_bytes(layout.id, self._sums[layout.id], device) if path is not None else None
            if nbytes is not None:
                found[layout.id] = nbytes
        return found

    # ---- what is written now

    def _part(self, spares: Spares, ways: _Ways) -> Part:
        _make(self._folder)
        sync(self._base)
        if self._save_also is not None:
            self._save_also(self._folder)
            check_saved(self._folder, (OPTIMIZER_FILE, *(_file_of(layout) for layout in self._engine.layouts)))
        pending: list[tuple[State, Path]] = []
        try:
            stored = tuple(self._put_states(spares, ways, pending))
            crc = self._write_optimizer(self._folder / OPTIMIZER_FILE)
            manifest = Manifest(
                self._contents.step, self._number, self._attempt, self._run_id.hex, self._ranks.rank, self._ranks.count,
                RULE, tuple(map(ParamForm.of, self._contents.params)), stored, crc,
            )  # fmt: skip
        except BaseException:
            for state, _ in pending:
                state.close()
            raise
        return Part(self._directory, manifest, pending)

    def _put_states(self, spares: Spares, ways: _Ways, pending: list[tuple[State, Path]]) -> Iterator[Stored]:
        """Links, holds or copies each."""
        layouts = self._engine.layouts
        copied = [layout for layout in layouts if layout.id not in self._linkable]
        spares.make_room(self._folder, self._linkable, copied)
        held = frozenset(s for s in ways.held if spares.make_for(layouts[s]))
        if len(held) < len(ways.held):
            log.warning(
                "checkpoint %s: %d of %d subgroups are copied while training waits, as their paths have no room for "
                "spare files", self._directory, len(ways.held) - len(held), len(ways.held),
            )  # fmt: skip
        with IoPool(THREADS) as pool:
            for layout in layouts:
                kind, target = kind_of(layout, self._ranks.rank), self._folder / _file_of(layout)
                step = self._linked(layout, target)
                if step is None and layout.id in held:
                    step = self._held(layout, target, pending)
                if step is None:
                    step = self._copied(pool, layout, target, pending if layout.id in ways.in_memory else None)
                yield Stored(target.name, step, layout.numel, kind.weight_format, kind.state_bytes, layout.segments)

    def _linked(self, layout: Layout, target: Path) -> int | None:
        """The step of the state, None when it was not to be linked or the file system would not have it."""
        path = self._path(layout)
        if path is None or layout.id not in self._linkable:
            return None
        return path.step_of(layout.id) if path.link(layout.id, self._sums[layout.id], target) else None

    def _held(self, layout: Layout, target: Path, pending: list[tuple[State, Path]]) -> int:
        path = self._path(layout)
        assert path is not None, "only files are held"
        pending.append((StateInFile(path.hold(layout.id, self._sums[layout.id])), target))
        return path.step_of(layout.id)

    def _copied(self, pool: IoPool, layout: Layout, target: Path, pending: list[tuple[State, Path]] | None) -> int:
        """To the file or, where it may be `pending`, to memory."""
        kind, step = kind_of(layout, self._ranks.rank), self._contents.step
        nbytes, weights = padded_bytes(kind.data_bytes), self._sums[layout.id]
        with self._engine.memory.arrays(layout.id, changed=False) as arrays:
            # One block of whole pages, which begins with the first array.
            address = arrays["exp_avg"].data_ptr()
            fill(address + kind.data_bytes, 0, nbytes - kind.data_bytes)
            if pending is None:
                write_state(pool, StateInMemory(kind, self._run_id.bytes, step, weights, address, arrays), target)
            else:
                copy = aligned_buffer(nbytes)
                ctypes.memmove(copy.ctypes.data, address, nbytes)
                state = StateInMemory(kind, self._run_id.bytes, step, weights, copy.ctypes.data, copy)
                pending.append((state, target))
        return step

    def _write_optimizer(self, target: Path) -> int:
        """The checksum of what was written."""
        written = io.BytesIO()
        torch.save(dict(self._contents.optimizer), written)
        try:
            torch.load(io.BytesIO(written.getvalue()), weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"The param groups hold something that a checkpoint cannot: {error} Leave plain values and tensors in "
                "them."
            ) from error
        target.write_bytes(written.getvalue())
        return zlib.crc32(written.getvalue())


@contextmanager
def _agreed(ranks: Ranks, directory: Path) -> Iterator[None]:
    """All ranks come through this, or none does: CheckpointFailed where another one failed."""
    try:
        yield
    except BaseException:
        ranks.all_true(False)
        raise
    if not ranks.all_true(True):
        raise CheckpointFailed(f"Another rank could not write its part of {directory}: it is not complete.")


@contextmanager
def _abandoned_on_error(folder: Path) -> Iterator[None]:
    """What is in `folder`, a rank's part of a checkpoint, goes when this fails. CheckpointFailed for OSError."""
    try:
        yield
    except BaseException:
        abandon(folder)
        with _failed_on_error(folder.parent):
            raise


@contextmanager
def _failed_on_error(directory: Path) -> Iterator[None]:
    """CheckpointFailed for OSError and PathUnusable."""
    try:
        yield
    except (OSError, PathUnusable) as error:
        raise CheckpointFailed(f"{directory} cannot be written: {error}. Older ones are as they were.") from error


def _retire(
    base: Path, expiring: Sequence[Checkpoint], store: TierStore | None, made: Checkpoint, spares: Spares | None = None
) -> None:
    """`made` is complete: older ones go, and of their files the paths make their spares."""
    for checkpoint in expiring:
        retract(checkpoint)
    if spares is not None:
        spares.take_promised()
    remove_remains(base, made.manifest.rank)
    if store is not None:
        store.last_checkpoint = os.fspath(made.directory)


def _updating(engine: Engine) -> Callable[[], bool]:
    """Whether an update runs. An engine that nobody holds any more has none."""
    alive = weakref.ref(engine)

    def updating() -> bool:
        found = alive()
        return found is not None and found.updating

    return updating


def _nothing() -> None:
    return None


def _next(step: int, complete: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint]) -> tuple[str, str, int]:
    """Directory, attempt and number of the checkpoint that comes. No damaged one is written to."""
    number = max((one.manifest.number for one in complete), default=0) + 1
    taken = {one.directory.name for one in complete} | {one.directory.name for one in damaged}
    while f"step-{step}.{number}" in taken:
        number += 1
    name = f"step-{step}" if f"step-{step}" not in taken else f"step-{step}.{number}"
    return name, uuid.uuid4().hex[:12], number


def _file_of(layout: Layout) -> str:
    return f"{layout.id:06d}.tide"


def _make(folder: Path) -> None:
    """With its parent, which another rank may be removing right now, as an empty one."""
    while True:
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            return
