"""Checksums of what `save_also` wrote into a checkpoint: taken once it is on the disk, checked before it is loaded."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.agent.checkpoints.manifest_schema import is_below
from tidegate.agent.checkpoints.snapshot import Pace
from tidegate.agent.tiers.plain_files import kind_of_entry, open_plain
from tidegate.errors import ConfigError, DataTruncated, FileDamaged

log = logging.getLogger("tidegate.tiers")

CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file that `save_also` wrote."""

    file: str
    """Its path below the folder of the rank, with `/` between the parts."""
    nbytes: int
    sha256: str


def check_saved(folder: Path, own: Iterable[str]) -> None:
    """ConfigError when `save_also` left something that cannot be part of a checkpoint: a link, a FIFO, a name that is
    not UTF-8. `own`: names at the top that Tidegate will use."""
    taken = set(own)
    for path, is_plain in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if name in taken:
            raise ConfigError(f"save_also wrote {name}, which is a name of Tidegate's: give the file another name.")
        if not is_plain:
            kind = kind_of_entry(path.lstat().st_mode)
            raise ConfigError(
                f"save_also left something that cannot be part of a checkpoint: {name} is {kind}. Write plain files "
                "and directories there, a copy instead of a link."
            )
        if not is_below(name):
            raise ConfigError(f"save_also wrote {name!a}, whose name is not UTF-8: give the file another name.")


def checksums_of(folder: Path, leave_out: frozenset[str], pace: Pace = lambda _: None) -> tuple[SavedFile, ...]:
    """All files below `folder`, in the order of their names, but for those at the top that Tidegate wrote itself."""
    names = sorted(path.relative_to(folder).as_posix() for path, _ in _entries(folder))
    return tuple(_saved(folder, name, pace) for name in names if name not in leave_out)


def verify(folder: Path, files: tuple[SavedFile, ...]) -> None:
    """FileDamaged when one of them is not as it was written, DataTruncated when it is missing, StrangeEntry when
    something else is in its place."""
    for file in files:
        path = folder / file.file
        try:
            found = _saved(folder, file.file, lambda _: None, most=file.nbytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataTruncated(path, "no file", "one") from error
        if found.nbytes != file.nbytes:
            raise FileDamaged(path, f"{found.nbytes:,} bytes", f"{file.nbytes:,}")
        if found.sha256 != file.sha256:
            raise FileDamaged(path, f"SHA-256 {found.sha256}", file.sha256)


_said: set[str] = set()
"""Folders of which it was said that nothing is known of their files."""


def say_unknown(folder: Path, leave_out: frozenset[str]) -> None:
    """Warns, once for a folder, that its files have no checksums, if there are any."""
    names = sorted({path.relative_to(folder).as_posix() for path, _ in _entries(folder)} - leave_out)
    if names and str(folder) not in _said:
        _said.add(str(folder))
        log.warning(
            "checkpoint %s was saved by an earlier Tidegate: there are no checksums of %s, damage to them would not be "
            "seen. The next checkpoint has them.", folder.parent, ", ".join(names),
        )  # fmt: skip


def _saved(folder: Path, name: str, pace: Pace, most: int | None = None) -> SavedFile:
    """`most`: a file that is longer is not read."""
    digest = hashlib.sha256()
    with open_plain(folder / name) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size != most:
            return SavedFile(name, size, "")
        pace(0)
        nbytes = 0
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
            pace(0)
    return SavedFile(name, nbytes, digest.hexdigest())


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """All that is below it but directories, and whether each is a plain file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield Path(entry.path), entry.is_file(follow_symlinks=False)
