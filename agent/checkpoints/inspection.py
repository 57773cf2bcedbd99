"""Reads whole checkpoints for whoever asks whether they are sound, and removes those that are not."""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tidegate.agent.checkpoints.manifest import (
    OPTIMIZER_FILE,
    Checkpoint,
    DamagedCheckpoint,
    Manifest,
    find_checkpoints,
    has_all_ranks,
    manifests_of,
    step_entries,
    warn,
)
from tidegate.agent.checkpoints.reader import read_from, read_header
from tidegate.agent.checkpoints.writer_lock import Writing
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.plain_files import is_directory, open_plain
from tidegate.agent.tiers.state_file import PAGE_BYTES, Header, StateKind, padded_bytes
from tidegate.errors import (
    CheckpointFailed,
    CheckpointTaken,
    FileUnreadable,
    ManifestDamaged,
    StateFileError,
    StorageError,
)
from tidegate.kernels import aligned_buffer, crc32c

log = logging.getLogger("tidegate.tiers")

OURS: Final = re.compile(r"rank(0|[1-9][0-9]*)(\.json|\.new|-[0-9a-f]{1,32})")
"""Names in the directory of a checkpoint that Tidegate gives."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """One checkpoint, every byte of which was read."""

    directory: Path
    step: int
    """-1 where nobody can tell."""
    nbytes: int
    """In its files, those that paths or other checkpoints hold too included."""
    is_complete: bool
    damage: DamagedCheckpoint | None
    unreadable: str = ""
    """Why it could not be looked at."""


def inspect(directory: str | os.PathLike[str]) -> list[Inspected]:
    """All that is in a directory of checkpoints, in the order of their names. PathUnusable when it cannot be read."""
    return [_inspect(step) for step in step_entries(Path(os.path.abspath(directory)))]


def _inspect(step: Path) -> Inspected:
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
    found = manifests[0].step if manifests else -1
    return Inspected(step, found, _bytes_in(step), has_all_ranks(manifests), damage, unreadable)


def find_sound_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest complete checkpoint of which every byte is as it was written, None when there is none. All of it is
    read, each rank's part by that rank: all ranks call this, and get the same one.

    Those that are not sound are left out, with a warning that says why. PathUnusable when the directory cannot be read.
    """
    ranks = Ranks.current()
    mine = {one.directory.name: one for one in find_checkpoints(directory, ranks.rank)}
    for name in ranks.broadcast_from_first(list(mine)):
        if ranks.all_true(name in mine and _is_sound(mine[name])):
            return mine[name]
    return None


def _is_sound(checkpoint: Checkpoint) -> bool:
    try:
        _check_part(checkpoint)
    except StateFileError as reason:
        warn(DamagedCheckpoint(checkpoint.directory, reason))
    except (StorageError, OSError) as error:
        log.warning("checkpoint %s is left out: %s", checkpoint.directory, error)
    else:
        return True
    return False


def _check_part(checkpoint: Checkpoint) -> None:
    """`StateFileError` when something in the part of a rank is not as it was written."""
    manifest = checkpoint.manifest
    checkpoint.verify()
    path = checkpoint.folder / OPTIMIZER_FILE
    with read_from(path), open_plain(path) as file:
        found = zlib.crc32(file.read())
    if found != manifest.optimizer_crc:
        raise ManifestDamaged(path, f"checksum {found:#010x}", f"{manifest.optimizer_crc:#010x}")
    for index, stored in enumerate(manifest.subgroups):
        path = checkpoint.folder / stored.file
        header = read_header(path)
        header.check_run(bytes.fromhex(manifest.run_id), path)
        kind = StateKind(manifest.rule, manifest.rank, index, stored.numel, stored.weight_format, stored.state_bytes)
        header.check_kind(kind, path)
        header.check_step(stored.step, path)
        _check_blocks(path, header)


def _check_blocks(path: Path, header: Header) -> None:
    """BlockDamaged or DataTruncated when the data are not those that the header has checksums of."""
    memory = aligned_buffer(max(PAGE_BYTES, min(header.block_bytes, padded_bytes(header.data_bytes))))
    with read_from(path), open_plain(path) as file:
        header.check_file(os.fstat(file.fileno()).st_size, path)
        for index in range(len(header.block_checksums)):
            offset, size = header.block(index)
            file.seek(offset)
            memory[:size] = np.frombuffer(file.read(size), np.uint8)
            header.check_block(index, crc32c(memory.ctypes.data, size), path)


def remove_damaged(found: Inspected) -> None:
    """Removes a damaged checkpoint, after another look. A link that is in its place goes, what it leads to stays.

    CheckpointTaken while a run saves to the directory; CheckpointFailed when it is sound now, holds what is not
    Tidegate's, or cannot be removed.
    """
    directory, writing = found.directory, Writing()
    try:
        writing.take(directory.parent)
        now = _inspect(directory)
        if now.unreadable:
            raise CheckpointFailed(f"{directory} was not removed: {now.unreadable}")
        if now.damage is None or not now.damage.is_removable:
            raise CheckpointFailed(f"{directory} is no longer what was found: look again.")
        if not is_directory(directory):
            os.unlink(directory)
            return
        if strange := sorted(path.name for path in directory.iterdir() if not OURS.fullmatch(path.name)):
            raise CheckpointFailed(
                f"{directory} holds what is not Tidegate's: {', '.join(strange)}. Look who put it there, and remove it."
            )
        # Without its manifests it is no checkpoint any more, whatever stops what follows.
        for path in sorted(directory.iterdir(), key=is_directory):
            shutil.rmtree(path) if is_directory(path) else os.unlink(path)
        directory.rmdir()
    except CheckpointTaken as error:
        raise CheckpointTaken(f"{directory} was not removed: {error}") from error
    except OSError as error:
        raise CheckpointFailed(f"{directory} cannot be removed: {error.strerror}.") from error
    finally:
        writing.close()


def _bytes_in(step: Path) -> int:
    """Of what can be looked at; files may vanish meanwhile."""
    total = 0
    with suppress(OSError):
        for at, _, names in os.walk(step) if is_directory(step) else ():
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(at, name)).st_size
    return total
