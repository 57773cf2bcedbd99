"""Room for a checkpoint: its copies, and a spare file for each file of a path that it holds.

What a checkpoint holds is never written to again, so the next flush needs another file. It is there before the
checkpoint is: PathFull comes when one saves, and never from a flush.
"""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tidegate.agent.checkpoints.manifest import Checkpoint
from tidegate.agent.checkpoints.snapshot import BLOCK_BYTES
from tidegate.agent.engine.engine import Engine
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.scratch import free_bytes
from tidegate.agent.tiers.state_file import file_bytes
from tidegate.agent.tiers.tier_store import TierStore, kind_of
from tidegate.errors import PathFull, PathUnusable


class Spares:
    """The spare files of one rank's paths. `expiring`: checkpoints whose files become spares once the new one is
    complete; none where flushes may come before it is."""

    def __init__(self, engine: Engine, rank: int, expiring: Sequence[Checkpoint]) -> None:
        self._engine, self._rank, self._expiring = engine, rank, expiring
        self._promised: list[tuple[Layout, str, Path]] = []
        """Subgroups, their paths, and the file of an expiring checkpoint that becomes their spare."""

    def make_room(self, folder: Path, linked: Mapping[int, int], copied: Sequence[Layout]) -> None:
        """Spares for what will be linked (bytes of files, by subgroup), from expiring checkpoints where they have such
        files. PathFull, with nothing changed, when those and the copies do not fit."""
        donors = self._donors(folder)
        made: defaultdict[str, list[Layout]] = defaultdict(list)
        needed = sum(file_bytes(kind_of(layout, self._rank).data_bytes, BLOCK_BYTES) for layout in copied)
        for layout in self._engine.layouts:
            if layout.id not in linked:
                continue
            lives = self._engine.memory.residence[layout.id]
            if self._store.files_of(lives).has_spare(layout.id):
                continue
            if donors[linked[layout.id]]:
                self._promised.append((layout, lives, donors[linked[layout.id]].pop()))
            else:
                made[lives].append(layout)
                needed += linked[layout.id]
        count = sum(map(len, made.values()))
        _check_room(f"in {folder.parent.parent}", needed, free_bytes(folder), len(copied), count)
        for name, layouts in made.items():
            path, spares = self._store.files_of(name), sum(linked[layout.id] for layout in layouts)
            _check_room(f"of what is on path {name}", spares, path.free_bytes, 0, len(layouts))
        for name, layouts in made.items():
            for layout in layouts:
                self._store.files_of(name).add_spare(layout.id)

    def make_for(self, layout: Layout) -> bool:
        """A spare for a subgroup that lives on a path; False when the path has no room for it."""
        path = self._store.files_of(self._engine.memory.residence[layout.id])
        if path.has_spare(layout.id):
            return True
        try:
            if path.free_bytes < file_bytes(kind_of(layout, self._rank).data_bytes, path.settings.block_bytes):
                return False
            path.add_spare(layout.id)
        except (PathFull, PathUnusable, OSError):
            return False
        return True

    def take_promised(self) -> None:
        """The new checkpoint is complete, and those that gave files are no longer checkpoints."""
        for layout, path, file in self._promised:
            self._store.files_of(path).add_spare(layout.id, file)

    @property
    def _store(self) -> TierStore:
        assert self._engine.store is not None, "spares are a path's"
        return self._engine.store

    def _donors(self, folder: Path) -> defaultdict[int, list[Path]]:
        """State files that nothing else holds, and that nobody needs once this checkpoint is complete; by size."""
        found: defaultdict[int, list[Path]] = defaultdict(list)
        device = folder.stat().st_dev
        for checkpoint in self._expiring:
            for stored in checkpoint.manifest.subgroups:
                path = checkpoint.folder / stored.file
                with suppress(OSError):  # then it gives none
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and about.st_dev == device:
                        found[about.st_size].append(path)
        return found


def _check_room(where: str, needed: int, free: int, copies: int, spares: int) -> None:
    if needed > free:
        raise PathFull(
            f"A checkpoint {where} needs {needed:,} bytes more, {free:,} are free: for copies of {copies} subgroups "
            f"and {spares} spare files, as what is linked is never written to again. Free space, keep fewer "
            "checkpoints, or save to another file system.",
            needed, free,
        )  # fmt: skip
