"""One checkpoint on disk, complete or damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.agent.checkpoints.manifest import Manifest, file_unreadable_on_error
from tidegate.agent.checkpoints.saved_files import verify
from tidegate.agent.tiers.plain_files import require_directory
from tidegate.errors import FileUnreadable, ForeignByteOrder, NewerFormat, StateFileError, UnknownChecksum


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, with the manifest of one rank.

    directory: directory of the checkpoint, `step-<n>`.
    manifest: list of the files and parameters in this rank's part of the checkpoint.
    """

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of updates that the optimizer had done."""
        return self.manifest.step

    @property
    def folder(self) -> Path:
        """Folder with this rank's files, including the files of the user's `save_also`."""
        return self.directory / self.manifest.folder

    def verify(self) -> None:
        """Verifies the user's files that `save_also` wrote: reads them completely and compares their checksums.
        `load_checkpoint` calls this method. If you load weights from these files before you call `load_checkpoint`,
        call this method first.

        Raises FileDamaged, DataTruncated or StrangeEntry when a file is damaged, missing or replaced by another kind of
        entry, and FileUnreadable when the system refuses to read it.
        """
        with file_unreadable_on_error(self.folder):
            require_directory(self.folder)
            verify(self.folder, self.manifest.files)

    def __repr__(self) -> str:
        return f"Checkpoint({self.directory}, step {self.step}, rank {self.manifest.rank})"


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A checkpoint that cannot be used. Only `tidegate doctor` removes it.

    directory: directory of the checkpoint, `step-<n>`.
    reason: the error that says what is wrong with it.
    """

    directory: Path
    reason: StateFileError

    @property
    def is_removable(self) -> bool:
        """Whether `tidegate doctor` may remove the checkpoint. False if it may be undamaged: a newer version of
        Tidegate or another kind of machine wrote it, or it cannot be read at present."""
        return not isinstance(self.reason, NewerFormat | UnknownChecksum | ForeignByteOrder | FileUnreadable)

    def __repr__(self) -> str:
        return f"DamagedCheckpoint({self.directory}, {self.reason})"
