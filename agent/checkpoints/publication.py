"""Publishes a rank's part of a checkpoint (writes its manifest), unpublishes it (removes the manifest), and removes
folders that no manifest names."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tidegate.agent.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint
from tidegate.agent.checkpoints.discovery import step_directories
from tidegate.agent.checkpoints.manifest import Manifest, manifest_path, read_manifest
from tidegate.agent.checkpoints.manifest_schema import ATTEMPT
from tidegate.agent.tiers.plain_files import is_directory
from tidegate.errors import StateFileError

log = logging.getLogger("tidegate.tiers")


def publish(step_directory: Path, manifest: Manifest) -> Path:
    """Writes a rank's manifest with an atomic rename: from then on the rank's part exists. The files that it names must
    already be on stable storage."""
    path = manifest_path(step_directory, manifest.rank)
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(manifest.pack())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    try:
        sync(step_directory)
    except BaseException:  # the rename may not survive a power cut, and the caller removes the files: undo it
        path.unlink(missing_ok=True)
        raise
    return path


def unpublish(checkpoint: Checkpoint) -> None:
    """Removes the rank's manifest, so that its part no longer counts as a checkpoint. The files of the part remain."""
    manifest_path(checkpoint.directory, checkpoint.manifest.rank).unlink(missing_ok=True)
    sync(checkpoint.directory)


def unpublish_superseded(
    directory: Path, complete: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint], rank: int
) -> None:
    """Removes this rank's manifests of incomplete checkpoints (some ranks have no manifest there) that are older than
    the newest `complete` one. `damaged` checkpoints are kept, because they may have been complete."""
    newest = max((one.manifest.number for one in complete), default=0)
    usable: Iterable[Checkpoint | DamagedCheckpoint] = (*complete, *damaged)
    kept = {one.directory for one in usable}
    for step in list(step_directories(directory)):
        with suppress(OSError, StateFileError):
            if step not in kept and (manifest := read_manifest(manifest_path(step, rank))).number <= newest:
                unpublish(Checkpoint(step, manifest))


def remove_orphans(directory: Path, rank: int) -> None:
    """Removes folders of this rank that no manifest names, and directories of checkpoints that are then empty. Other
    files are left alone, and nothing is removed through a symbolic link. A directory that cannot be read or written is
    skipped, so that other checkpoints can still be saved."""
    for step in list(step_directories(directory)):
        with suppress(OSError):
            _remove_orphans_of(step, rank)


def _remove_orphans_of(step: Path, rank: int) -> None:
    named = _folders_named_by(manifest_path(step, rank))
    with suppress(FileNotFoundError, IsADirectoryError):
        manifest_path(step, rank).with_suffix(".new").unlink()
    for folder in step.glob(f"rank{rank}-*"):
        attempt = folder.name.removeprefix(f"rank{rank}-")
        ours = re.fullmatch(ATTEMPT, attempt) and is_directory(folder)
        if ours and named is not None and folder.name not in named:
            _remove_tree(folder)
    with suppress(OSError):  # not empty: it holds files of other ranks, or of the user
        step.rmdir()


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("files of an interrupted or expired checkpoint in %s cannot be removed: %s", folder, error)


def _folders_named_by(manifest: Path) -> Sequence[str] | None:
    """The folder that a manifest names, as a list with one element. Empty when there is no manifest, None when the
    manifest is unreadable."""
    try:
        return [read_manifest(manifest).folder]
    except FileNotFoundError:
        return []
    except StateFileError:
        return None


def sync(path: Path) -> None:
    """Writes a file, or the entries of a directory, to stable storage (fsync)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
