"""Writes a checkpoint: one state file per subgroup, hard-linked where its file is on the same file system, else copied.

Copies are made immediately, or by a background thread (module `background`) from state that is held unchanged while
training continues.

A complete checkpoint is never changed, and older ones are removed only after the new one is complete. If the new one is
written immediately, files of expired checkpoints become the spare files of the paths. A path therefore needs space for
(1 + kept checkpoints) times the state that is stored on it, and for that state once more while a checkpoint is copied
in the background.
"""

from __future__ import annotations

import io
import os
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.checkpoints.background import PendingCheckpoint, UnpublishedPart, remove_part, warn_not_removed
from tidegate.agent.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint
from tidegate.agent.checkpoints.discovery import list_checkpoints
from tidegate.agent.checkpoints.manifest import OPTIMIZER_FILE, Manifest, ParamForm, folder_name
from tidegate.agent.checkpoints.publication import remove_orphans, sync, unpublish, unpublish_superseded
from tidegate.agent.checkpoints.saved_files import check_saved
from tidegate.agent.checkpoints.snapshot import StateSource
from tidegate.agent.checkpoints.spare_files import SpareFiles
from tidegate.agent.checkpoints.state_copies import BackgroundCopies, StateCopies, file_name
from tidegate.agent.checkpoints.writer_lock import WriterLock
from tidegate.agent.engine.engine import Engine
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import CheckpointFailed, ConfigError, PathUnusable
from tidegate.knobs.setting_checks import check_directory, check_whole

AUTO_MEMORY_SHARE: Final = 0.5
"""Default limit of host memory for a checkpoint in the background, as a share of the free host memory. The memory is
for copies of state that is not in a file of a storage path."""

SaveAlso = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Contents:
    """Input of a checkpoint.

    engine, params: the engine with the state of the subgroups, and the parameters.
    optimizer: the optimizer's state other than that of the subgroups; it must be loadable with weights_only=True.
    step: number of updates of the optimizer.
    lock: the optimizer's locks on directories of checkpoints.
    """

    engine: Engine
    params: Sequence[torch.Tensor]
    optimizer: Mapping[str, Any]
    step: int
    lock: WriterLock


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a checkpoint: the directory with all checkpoints of the run.

    keep: number of complete checkpoints that are kept in the directory; older ones are removed.
    save_also: function of the user that writes further files into the rank's folder, which is its argument.
    """

    directory: str | os.PathLike[str]
    keep: int = 1
    save_also: SaveAlso | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", check_whole("keep", self.keep, 1))
        check_directory("directory", self.directory, "give a directory that all ranks can access")


def save(contents: Contents, target: Target, ranks: Ranks) -> Checkpoint:
    """Writes a checkpoint before it returns, then removes all but the `keep` newest complete checkpoints. A collective
    call of all ranks.

    Raises PathFull if there is not enough space, CheckpointTaken if another run or optimizer writes to the directory,
    and CheckpointFailed if the checkpoint cannot be written. The older checkpoints are then unchanged.
    """
    return _Writer(contents, target, ranks).write()


def save_in_background(contents: Contents, target: Target, ranks: Ranks, memory_bytes: int | None) -> PendingCheckpoint:
    """Starts a checkpoint, and returns while a background thread still copies a part of the state, from files that are
    held open or from copies in host memory. All other state is hard-linked or written before this returns, with the
    errors of `save`.

    memory_bytes: limit of the host memory for copies of state that is not in a file of a path; None for half of the
        free memory. State beyond the limit is written before this returns.
    """
    if memory_bytes is not None:
        memory_bytes = check_whole("memory_bytes", memory_bytes, 0)
    writer = _Writer(contents, target, ranks)
    limit = int(AUTO_MEMORY_SHARE * host_available_bytes()) if memory_bytes is None else memory_bytes
    background = writer.states.plan_background(limit)
    if ranks.all_true(not (background.held or background.in_memory)):
        return PendingCheckpoint.already_complete(writer.write())
    return writer.write_in_background(background)


class _Writer:
    """Writes one rank's part of one checkpoint."""

    def __init__(self, contents: Contents, target: Target, ranks: Ranks) -> None:
        self._contents, self._ranks, self._save_also = contents, ranks, target.save_also
        self._engine, self._store = contents.engine, contents.engine.store
        self._run_id = self._store.run_id if self._store is not None else uuid.uuid4()
        self._base = Path(os.path.abspath(target.directory))
        with _failing_together(ranks, self._base), _checkpoint_failed_on_error(self._base):
            self._base.mkdir(parents=True, exist_ok=True)
            if ranks.rank == 0:
                contents.lock.take(self._base)
        with _failing_together(ranks, self._base), _checkpoint_failed_on_error(self._base):
            complete, damaged = list_checkpoints(self._base, ranks.rank)
            unpublish_superseded(self._base, complete, damaged, ranks.rank)
            remove_orphans(self._base, ranks.rank)
        self._expiring = complete[target.keep - 1 :]
        """Older checkpoints that are removed when the new one is complete."""
        name, self._attempt, self._number = ranks.broadcast_from_first(_name_next(contents.step, complete, damaged))
        self._directory = self._base / name
        self._folder = self._directory / folder_name(ranks.rank, self._attempt)
        with _failing_together(ranks, self._directory):
            device = self._base.stat().st_dev
            self.states = StateCopies(contents.engine, contents.params, contents.step, self._run_id, ranks.rank, device)

    def write(self) -> Checkpoint:
        """Writes this rank's part of the checkpoint completely, removes expired checkpoints, and returns the new
        one."""
        spares = SpareFiles(self._engine, self._ranks.rank, self._expiring)
        with _failing_together(self._ranks, self._directory), _part_removed_on_error(self._folder):
            published = self._part(spares, BackgroundCopies()).publish()
        try:
            _remove_expired(self._base, self._expiring, self._store, published, spares)
        except Exception as error:
            warn_not_removed(self._directory, error)
        return published

    def write_in_background(self, background: BackgroundCopies) -> PendingCheckpoint:
        """Links files, holds files and copies state to memory before it returns. A thread then writes the held and
        copied state."""
        # Flushes may happen before the new checkpoint is complete, and expiring ones are kept until then: their files
        # are not reused.
        spares = SpareFiles(self._engine, self._ranks.rank, ())
        store = weakref.ref(self._store) if self._store is not None else _no_store
        base, expiring = self._base, self._expiring
        with _part_removed_on_error(self._folder), ExitStack() as on_error:
            with _failing_together(self._ranks, self._directory):
                part = self._part(spares, background)
                on_error.callback(part.release)
            pending = PendingCheckpoint(
                part, _updating(self._engine), lambda new: _remove_expired(base, expiring, store(), new), self._ranks
            )
            pending.start()
            on_error.pop_all()
        return pending

    # ---- the part that is written immediately

    def _part(self, spares: SpareFiles, background: BackgroundCopies) -> UnpublishedPart:
        """Creates the rank's folder and writes all its files except the state that the background thread copies.
        Returns the part, which counts as a part of the checkpoint only after its manifest is published."""
        _make_folder(self._folder)
        sync(self._base)
        if self._save_also is not None:
            self._save_also(self._folder)
            check_saved(self._folder, (OPTIMIZER_FILE, *(file_name(layout) for layout in self._engine.layouts)))
        pending: list[tuple[StateSource, Path]] = []
        try:
            stored = tuple(self.states.put(self._folder, spares, background, pending))
            crc = self._write_optimizer(self._folder / OPTIMIZER_FILE)
            rule = self._engine.rule
            manifest = Manifest(
                self._contents.step, self._number, self._attempt, self._run_id.hex, self._ranks.rank, self._ranks.count,
                rule.stored_as, tuple(map(ParamForm.of, self._contents.params)), stored, crc, (), rule.tensors,
            )  # fmt: skip
        except BaseException:
            for state, _ in pending:
                state.close()
            raise
        return UnpublishedPart(self._directory, manifest, pending)

    def _write_optimizer(self, target: Path) -> int:
        """Writes the optimizer's state other than that of the subgroups to the file `target`. Returns the CRC-32 of the
        file. Raises ConfigError if the state cannot be loaded with weights_only=True."""
        buffer = io.BytesIO()
        torch.save(dict(self._contents.optimizer), buffer)
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"The param groups hold a value that cannot be saved in a checkpoint: {error} Keep only plain values "
                "and tensors in them."
            ) from error
        target.write_bytes(buffer.getvalue())
        return zlib.crc32(buffer.getvalue())


def _failing_together(ranks: Ranks, directory: Path) -> AbstractContextManager[None]:
    """Context manager for a block that all ranks run: it fails on all of them or on none. A collective call."""
    return ranks.failing_together(
        CheckpointFailed(
            f"Another rank could not write its part of checkpoint {directory}, which stays incomplete. The error of "
            "that rank says why. Older checkpoints are unchanged."
        )
    )


@contextmanager
def _part_removed_on_error(folder: Path) -> Iterator[None]:
    """Context manager that deletes `folder`, a rank's part of a checkpoint, if the block raises. OSError and
    PathUnusable are converted to CheckpointFailed, other errors are raised as they are."""
    try:
        yield
    except BaseException:
        remove_part(folder)
        with _checkpoint_failed_on_error(folder.parent):
            raise


@contextmanager
def _checkpoint_failed_on_error(directory: Path) -> Iterator[None]:
    """Context manager that converts OSError and PathUnusable to CheckpointFailed."""
    try:
        yield
    except (OSError, PathUnusable) as error:
        why = str(error).removesuffix(".")
        raise CheckpointFailed(f"{directory} cannot be written: {why}. Older checkpoints are unchanged.") from error


def _remove_expired(
    base: Path,
    expiring: Sequence[Checkpoint],
    store: TierStore | None,
    new: Checkpoint,
    spares: SpareFiles | None = None,
) -> None:
    """Removes this rank's parts of the `expiring` checkpoints. May be called only after the checkpoint `new` is
    complete.

    base: the directory of checkpoints.
    store: the storage paths, which get the directory of `new` as their last checkpoint; None without paths.
    spares: turns files of the expiring checkpoints into spare files; None if these files are only removed.
    """
    for checkpoint in expiring:
        unpublish(checkpoint)
    if spares is not None:
        spares.take_reused_files()
    remove_orphans(base, new.manifest.rank)
    if store is not None:
        store.last_checkpoint = os.fspath(new.directory)


def _updating(engine: Engine) -> Callable[[], bool]:
    """Returns a function that tells whether an update is running. The function does not keep the engine alive, and
    returns False when the engine is garbage-collected."""
    reference = weakref.ref(engine)

    def updating() -> bool:
        live = reference()
        return live is not None and live.updating

    return updating


def _no_store() -> None:
    """Returns None. Called instead of a weak reference to the `TierStore` when the run has no storage paths."""


def _name_next(step: int, complete: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint]) -> tuple[str, str, int]:
    """Chooses the next checkpoint's directory name, random id (part of the names of its ranks' folders) and sequence
    number. The directories of complete and damaged checkpoints are not used again."""
    number = max((one.manifest.number for one in complete), default=0) + 1
    taken = {one.directory.name for one in complete} | {one.directory.name for one in damaged}
    while f"step-{step}.{number}" in taken:
        number += 1
    name = f"step-{step}" if f"step-{step}" not in taken else f"step-{step}.{number}"
    return name, uuid.uuid4().hex[:12], number


def _make_folder(folder: Path) -> None:
    """Creates the folder and its parent directory. Repeats that if another rank removes the empty parent at the same
    time."""
    while True:
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            return
