"""Checksums of the user's files that `save_also` wrote into a checkpoint.

They are computed after the files have reached stable storage, and checked before the checkpoint is loaded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from tidegate.agent.checkpoints.manifest_schema import Number, PathBelow, is_below
from tidegate.agent.checkpoints.snapshot import BeforeChunk
from tidegate.agent.tiers.plain_files import kind_of_entry, open_plain
from tidegate.errors import ConfigError, DataTruncated, FileDamaged

CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Name, size and checksum of one file that `save_also` wrote."""

    file: PathBelow
    """Path below the rank's folder, with `/` between the parts."""
    nbytes: Number
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def check_saved(folder: Path, reserved: Iterable[str]) -> None:
    """Checks the entries that `save_also` created in `folder`. ConfigError for an entry that cannot be part of a
    checkpoint: a link or FIFO, a name that is not UTF-8, or one of the `reserved` names, which Tidegate uses itself."""
    taken = set(reserved)
    for path, is_plain in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if name in taken:
            raise ConfigError(f"save_also wrote {name}, a name that Tidegate uses: give the file another name.")
        if not is_plain:
            kind = kind_of_entry(path.lstat().st_mode)
            raise ConfigError(
                f"save_also created an entry that cannot be part of a checkpoint: {name} is {kind}. Write plain files "
                "and directories only, and a copy instead of a link."
            )
        if not is_below(name):
            raise ConfigError(f"save_also wrote {name!a}, whose name is not UTF-8: give the file another name.")


def checksums_of(
    folder: Path, leave_out: frozenset[str], before_chunk: BeforeChunk = lambda _: None
) -> tuple[SavedFile, ...]:
    """Checksums of the user's files below `folder`, in the order of their names. `leave_out`: names of the files that
    Tidegate wrote, which are skipped. `before_chunk` is called before each chunk that is read."""
    names = sorted(path.relative_to(folder).as_posix() for path, _ in _entries(folder))
    return tuple(_checksum(folder, name, before_chunk) for name in names if name not in leave_out)


def verify(folder: Path, files: tuple[SavedFile, ...]) -> None:
    """Verifies files of a checkpoint by their checksums. FileDamaged when one has changed, DataTruncated when it is
    missing, StrangeEntry when another kind of entry is in its place."""
    for file in files:
        path = folder / file.file
        try:
            found = _checksum(folder, file.file, lambda _: None, expected_bytes=file.nbytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataTruncated(path, "no file", "the file that save_also wrote") from error
        if found.nbytes != file.nbytes:
            raise FileDamaged(path, f"{found.nbytes:,} bytes", f"{file.nbytes:,}")
        if found.sha256 != file.sha256:
            raise FileDamaged(path, f"SHA-256 {found.sha256}", file.sha256)


def _checksum(folder: Path, name: str, before_chunk: BeforeChunk, expected_bytes: int | None = None) -> SavedFile:
    """Reads a file and computes its checksum. If the size differs from `expected_bytes`, the file is not read and the
    checksum is an empty string."""
    digest = hashlib.sha256()
    with open_plain(folder / name) as file:
        size = os.fstat(file.fileno()).st_size
        if expected_bytes is not None and size != expected_bytes:
            return SavedFile(name, size, "")
        before_chunk(0)
        nbytes = 0
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
            before_chunk(0)
    return SavedFile(name, nbytes, digest.hexdigest())


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yields all entries below the folder except directories. The second value of each pair says whether the entry is
    a plain file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield Path(entry.path), entry.is_file(follow_symlinks=False)
