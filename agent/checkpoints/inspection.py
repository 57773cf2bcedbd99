"""Inspection of checkpoints: verifies them completely, and removes damaged ones."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tidegate.agent.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint
from tidegate.agent.checkpoints.discovery import (
    existing_path,
    find_checkpoints,
    has_all_ranks,
    manifests_of,
    step_entries,
    warn_damaged,
)
from tidegate.agent.checkpoints.manifest import Manifest
from tidegate.agent.checkpoints.reader import checkpoint_failed_on_error, read_header, read_optimizer
from tidegate.agent.checkpoints.writer_lock import WriterLock
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.plain_files import is_directory, open_plain
from tidegate.agent.tiers.state_file import PAGE_BYTES, Header, padded_bytes
from tidegate.errors import (
    CheckpointFailed,
    CheckpointTaken,
    FileUnreadable,
    StateFileError,
    StorageError,
)
from tidegate.kernels import aligned_buffer, crc32c

log = logging.getLogger("tidegate.tiers")

TIDEGATE_NAMES: Final = re.compile(r"rank(0|[1-9][0-9]*)(\.json|\.new|-[0-9a-f]{1,32})")
"""Pattern of the names that Tidegate gives to entries of a checkpoint's directory."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """Result of inspecting one checkpoint. If the manifests of all ranks exist (`is_complete`), the inspection reads
    the files that they list completely."""

    directory: Path
    step: int
    """Number of updates at the time of the checkpoint; -1 if unknown."""
    nbytes: int
    """Bytes of the checkpoint's files, including files that are hard-linked elsewhere (by paths or other
    checkpoints)."""
    is_complete: bool
    damage: DamagedCheckpoint | None
    unreadable: str = ""
    """Reason why the checkpoint could not be read; "" if it could."""


def inspect(directory: str | os.PathLike[str]) -> list[Inspected]:
    """Inspects all checkpoints in a directory, in the order of their names. PathUnusable when the directory cannot be
    read."""
    return [_inspect(step) for step in step_entries(existing_path(directory))]


def _inspect(step: Path) -> Inspected:
    """Inspects the checkpoint in the directory `step`. If it is complete, the parts of all its ranks are read."""
    manifests: Sequence[Manifest] = ()
    damage, unreadable = None, ""
    try:
        manifests = manifests_of(step)
        for manifest in manifests if has_all_ranks(manifests) else ():
            _check_part(Checkpoint(step, manifest))
    except FileUnreadable as error:
        unreadable = str(error)
    except StateFileError as reason:
        damage = DamagedCheckpoint(step, reason)
    except (StorageError, OSError) as error:
        unreadable = str(error)
    number = manifests[0].step if manifests else -1
    return Inspected(step, number, _bytes_in(step), has_all_ranks(manifests), damage, unreadable)


def find_sound_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """Finds the newest complete checkpoint without damage, and returns None when there is none. A collective call: each
    rank reads its own part completely, and all ranks get the same checkpoint.

    Damaged and unreadable checkpoints are left out, with a warning that gives the reason. Raises PathUnusable when the
    directory cannot be read, and ConfigError for an address such as s3://….
    """
    ranks = Ranks.current()
    complete = {one.directory.name: one for one in find_checkpoints(directory, ranks.rank)}
    for name in ranks.broadcast_from_first(list(complete)):
        if ranks.all_true(name in complete and _is_sound(complete[name])):
            return complete[name]
    return None


def _is_sound(checkpoint: Checkpoint) -> bool:
    """Whether this rank's part is undamaged and readable; otherwise a warning is logged."""
    try:
        _check_part(checkpoint)
    except StateFileError as reason:
        warn_damaged(DamagedCheckpoint(checkpoint.directory, reason))
    except (StorageError, OSError) as error:
        log.warning("checkpoint %s cannot be read and is skipped: %s", checkpoint.directory, error)
    else:
        return True
    return False


def _check_part(checkpoint: Checkpoint) -> None:
    """Reads a rank's part completely. `StateFileError` when something in it is damaged."""
    manifest = checkpoint.manifest
    checkpoint.verify()
    read_optimizer(checkpoint)
    for index, stored in enumerate(manifest.subgroups):
        _check_blocks(checkpoint.folder / stored.file, read_header(checkpoint, index))


def _check_blocks(path: Path, header: Header) -> None:
    """Reads all blocks of a state file. BlockDamaged or DataTruncated when they do not match the checksums in the
    header."""
    memory = aligned_buffer(max(PAGE_BYTES, min(header.block_bytes, padded_bytes(header.data_bytes))))
    with checkpoint_failed_on_error(path), open_plain(path) as file:
        header.check_file(os.fstat(file.fileno()).st_size, path)
        for index in range(len(header.block_checksums)):
            offset, size = header.block(index)
            file.seek(offset)
            memory[:size] = np.frombuffer(file.read(size), np.uint8)
            header.check_block(index, crc32c(memory.ctypes.data, size), path)


def remove_damaged(found: Inspected) -> None:
    """Removes a damaged checkpoint after inspecting it again. If a symbolic link is in its place, only the link is
    removed, not its target.

    CheckpointTaken while a run saves to the directory. CheckpointFailed when the checkpoint is no longer damaged,
    contains files that are not Tidegate's, or cannot be removed.
    """
    directory, lock = found.directory, WriterLock()
    try:
        lock.take(directory.parent)
        current = _inspect(directory)
        if current.unreadable:
            raise CheckpointFailed(f"{directory} was not removed: {current.unreadable}")
        if current.damage is None or not current.damage.is_removable:
            raise CheckpointFailed(f"{directory} has changed since it was listed: list it again, nothing was removed.")
        if not is_directory(directory):
            os.unlink(directory)
            return
        if strange := sorted(path.name for path in directory.iterdir() if not TIDEGATE_NAMES.fullmatch(path.name)):
            raise CheckpointFailed(
                f"{directory} holds files that are not Tidegate's: {', '.join(strange)}. Find out who created "
                "them and remove them, then try again. Nothing was removed."
            )
        # The manifests are removed first: without them it is no checkpoint any more, even if the rest fails.
        for path in sorted(directory.iterdir(), key=is_directory):
            shutil.rmtree(path) if is_directory(path) else os.unlink(path)
        directory.rmdir()
    except CheckpointTaken as error:
        raise CheckpointTaken(f"{directory} was not removed: {error}") from error
    except OSError as error:
        raise CheckpointFailed(f"{directory} cannot be removed: {error.strerror}.") from error
    finally:
        lock.close()


def _bytes_in(step: Path) -> int:
    """Bytes of the readable files in a checkpoint's directory. Files may vanish while they are counted."""
    total = 0
    with suppress(OSError):
        for at, _, names in os.walk(step) if is_directory(step) else ():
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(at, name)).st_size
    return total
