"""Reserves the disk space of a checkpoint: space for its copies, and one spare file for each file of a path that the
checkpoint holds.

A file that a checkpoint holds is never written to again, so the next flush needs another file. That spare file is
created before the checkpoint, so that PathFull is raised while the checkpoint is saved and not during a flush.
"""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tidegate.agent.checkpoints.checkpoint import Checkpoint
from tidegate.agent.checkpoints.snapshot import BLOCK_BYTES
from tidegate.agent.engine.engine import Engine
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.disk_space import free_bytes
from tidegate.agent.tiers.state_file import file_bytes
from tidegate.agent.tiers.tier_store import TierStore, state_kind
from tidegate.errors import PathFull, PathUnusable


class SpareFiles:
    """Creates the spare files on one rank's paths for a new checkpoint. The next flushes write to them, because files
    that a checkpoint holds do not change. `expiring`: checkpoints that are removed when the new one is complete; their
    files then become spare files. A checkpoint in the background has no `expiring` ones, because flushes need spare
    files before it is complete."""

    def __init__(self, engine: Engine, rank: int, expiring: Sequence[Checkpoint]) -> None:
        self._engine, self._rank, self._expiring = engine, rank, expiring
        self._reused: list[tuple[Layout, str, Path]] = []
        """Files of expiring checkpoints that will become spare files: subgroup, path and file."""

    def reserve(self, folder: Path, linked: Mapping[int, int], copied: Sequence[Layout]) -> None:
        """Reserves the disk space of the new checkpoint. Creates a spare file for each subgroup whose file the
        checkpoint will hard-link, unless the subgroup has one, and checks that there is space for all copies. A file of
        an expiring checkpoint is used instead of a new spare file if its size is the same. Raises PathFull, before
        anything is changed, if there is not enough space.

        folder: the rank's folder in the new checkpoint.
        linked: the subgroups whose files will be hard-linked, by id, each with the size of its file in bytes.
        copied: the subgroups whose state will be copied.
        """
        reusable = self._reusable_files(folder)
        new: defaultdict[str, list[Layout]] = defaultdict(list)
        needed = sum(file_bytes(state_kind(layout, self._rank).data_bytes, BLOCK_BYTES) for layout in copied)
        for layout in self._engine.layouts:
            if layout.id not in linked:
                continue
            path_name = self._engine.memory.residence[layout.id]
            if self._store.storage_path(path_name).has_spare(layout.id):
                continue
            if reusable[linked[layout.id]]:
                self._reused.append((layout, path_name, reusable[linked[layout.id]].pop()))
            else:
                new[path_name].append(layout)
                needed += linked[layout.id]
        count = sum(map(len, new.values()))
        _check_space(f"in {folder.parent.parent}", needed, free_bytes(folder), len(copied), count)
        for name, layouts in new.items():
            path, spares = self._store.storage_path(name), sum(linked[layout.id] for layout in layouts)
            _check_space(f"of the state on path {name}", spares, path.free_bytes, 0, len(layouts))
        for name, layouts in new.items():
            for layout in layouts:
                self._store.storage_path(name).add_spare(layout.id)

    def add_for(self, layout: Layout) -> bool:
        """Creates a spare file, to which the next flush writes, for a subgroup that is stored on a path. Returns True
        if the subgroup has a spare file now, False if it cannot be created: no space, no free file descriptor, or
        another I/O error."""
        path = self._store.storage_path(self._engine.memory.residence[layout.id])
        if path.has_spare(layout.id):
            return True
        try:
            if path.free_bytes < file_bytes(state_kind(layout, self._rank).data_bytes, path.settings.block_bytes):
                return False
            path.add_spare(layout.id)
        except (PathFull, PathUnusable, OSError):
            return False
        return True

    def take_reused_files(self) -> None:
        """Turns files of expired checkpoints into spare files. May be called only after the new checkpoint is complete
        and this rank's manifests of the expired checkpoints are removed."""
        for layout, path, file in self._reused:
            self._store.storage_path(path).add_spare(layout.id, file)

    @property
    def _store(self) -> TierStore:
        assert self._engine.store is not None, "only paths have spare files"
        return self._engine.store

    def _reusable_files(self, folder: Path) -> defaultdict[int, list[Path]]:
        """Lists the state files of expiring checkpoints, by size in bytes, that can become spare files: files on the
        file system of `folder` that have no other hard link."""
        files: defaultdict[int, list[Path]] = defaultdict(list)
        device = folder.stat().st_dev
        for checkpoint in self._expiring:
            for stored in checkpoint.manifest.subgroups:
                path = checkpoint.folder / stored.file
                with suppress(OSError):  # a file that cannot be inspected is not reused
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_dev == device:
                        files[status.st_size].append(path)
        return files


def _check_space(where: str, needed: int, free: int, copies: int, spares: int) -> None:
    """Raises PathFull if `needed` bytes are more than the `free` bytes. The other arguments are for the message.

    where: phrase for the place of the checkpoint ("in /data") or of the spare files ("of the state on path nvme").
    copies, spares: numbers of copied subgroups and of spare files, which need the space.
    """
    if needed > free:
        raise PathFull(
            f"A checkpoint {where} needs {needed:,} bytes more, and {free:,} bytes are free. Space is needed "
            f"for copies of {copies} subgroups and for {spares} spare files. Later updates write to spare files, "
            "because files that belong to a checkpoint do not change. Free space, keep fewer checkpoints, or save to "
            "another file system.",
            needed, free,
        )  # fmt: skip
