"""Writes a checkpoint: a state file for each subgroup, linked where the file is on the same file system, else copied.

Nothing is changed in a checkpoint that is complete, and no older one goes before the new one is. What it costs in
space: files of expired checkpoints become the spare files of the paths, so that a path needs (1 + kept checkpoints)
times its share.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tidegate.agent.engine.engine import Engine
from tidegate.agent.ranks import Ranks
from tidegate.agent.subgroups import Layout, Segment, flat
from tidegate.agent.tiers.format import Header, StateKind, file_bytes, header_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.manifest import (
    OPTIMIZER_FILE,
    Checkpoint,
    Manifest,
    ParamForm,
    Stored,
    folder_name,
    forget_overtaken,
    publish,
    readable_checkpoints,
    remove_remains,
    retract,
    sync,
)
from tidegate.agent.tiers.path import StoragePath, write_header
from tidegate.agent.tiers.scratch import free_bytes, reserve
from tidegate.agent.tiers.store import RULE, kind_of
from tidegate.errors import CheckpointFailed, ConfigError, PathFull
from tidegate.kernels import IoPool, IoTicket, crc32c, fill, open_direct
from tidegate.plan.ops import is_path

BLOCK_BYTES: Final = 1 << 20
THREADS: Final = 4
POLL_SECONDS: Final = 1.0

SaveAlso = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint is made of. `optimizer`: what is small, and can be loaded as weights only; `step`: updates."""

    engine: Engine
    params: Sequence[torch.Tensor]
    optimizer: Mapping[str, Any]
    step: int


def save(
    contents: Contents, directory: str | os.PathLike[str], keep: int, save_also: SaveAlso | None, ranks: Ranks
) -> Checkpoint:
    """Writes a checkpoint and, when it is complete, removes all but the `keep` newest.

    PathFull when there is no room, CheckpointFailed when it cannot be written; then the others are as they were.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} is out of range: at least 1.")
    base = Path(os.path.abspath(directory))
    base.mkdir(parents=True, exist_ok=True)
    complete = readable_checkpoints(base, ranks.rank)
    forget_overtaken(base, complete, ranks.rank)
    remove_remains(base, ranks.rank)
    writer = _Writer(contents, ranks, complete[keep - 1 :])
    name, attempt, number = ranks.from_first(_next(contents.step, complete))
    try:
        made = writer.write(base / name, attempt, number, save_also)
    except BaseException:
        ranks.all_true(False)
        raise
    if not ranks.all_true(True):
        raise CheckpointFailed(f"Another rank could not write its part of {made.directory}: it is not complete.")
    writer.retire()
    remove_remains(base, ranks.rank)
    if contents.engine.store is not None:
        contents.engine.store.last_checkpoint = os.fspath(made.directory)
    return made


def weights_checksum(params: Sequence[torch.Tensor], segments: Sequence[Segment]) -> int:
    """The CRC-32C of the weights of one subgroup."""
    found = 0
    for s in segments:
        weights = flat(params[s.param])[s.offset : s.offset + s.numel].cpu()
        found = crc32c(weights.data_ptr(), weights.numel() * weights.element_size(), found)
    return found


def finish(ticket: IoTicket) -> IoTicket:
    """When it is done; Python handles signals meanwhile."""
    while not ticket.wait(POLL_SECONDS):
        pass
    return ticket


def _next(step: int, complete: Sequence[Checkpoint]) -> tuple[str, str, int]:
    """Directory, attempt and number of the checkpoint that comes."""
    number = max((one.manifest.number for one in complete), default=0) + 1
    taken = {one.directory.name for one in complete}
    name = f"step-{step}" if f"step-{step}" not in taken else f"step-{step}.{number}"
    return name, uuid.uuid4().hex[:12], number


class _Writer:
    """One rank's part. `expiring`: what goes when it is complete."""

    def __init__(self, contents: Contents, ranks: Ranks, expiring: Sequence[Checkpoint]) -> None:
        self._contents, self._ranks, self._expiring = contents, ranks, expiring
        self._store = contents.engine.store
        self._run_id = self._store.run_id if self._store is not None else uuid.uuid4()
        self._promised: list[tuple[Layout, str, Path]] = []
        """Subgroups, their paths, and the file of an expiring checkpoint that becomes their spare."""

    def write(self, directory: Path, attempt: str, number: int, save_also: SaveAlso | None) -> Checkpoint:
        folder = directory / folder_name(self._ranks.rank, attempt)
        _make(folder)
        try:
            sync(directory.parent)
            stored = self._write_state(folder)
            crc = self._write_optimizer(folder / OPTIMIZER_FILE)
            if save_also is not None:
                save_also(folder)
            _sync_all(folder)
            manifest = Manifest(
                self._contents.step, number, attempt, self._run_id.hex, self._ranks.rank, self._ranks.count, RULE,
                tuple(map(ParamForm.of, self._contents.params)), tuple(stored), crc,
            )  # fmt: skip
            publish(directory, manifest)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                directory.rmdir()
            if isinstance(error, OSError):
                raise CheckpointFailed(
                    f"{directory} cannot be written: {error}. Older ones are as they were."
                ) from error
            raise
        return Checkpoint(directory, manifest)

    def retire(self) -> None:
        """Removes what has expired; of its files the paths make their spares."""
        for checkpoint in self._expiring:
            retract(checkpoint)
        for layout, path, file in self._promised:
            self._files_of(path).add_spare(layout.id, file)

    # ---- state

    def _write_state(self, folder: Path) -> list[Stored]:
        layouts, params = self._contents.engine.layouts, self._contents.params
        sums = [weights_checksum(params, layout.segments) for layout in layouts]
        linked = self._linkable(folder, sums)
        copied = [layout for layout in layouts if layout.id not in linked]
        self._make_room(folder, linked, copied)
        stored = []
        with IoPool(THREADS) as pool:
            for layout in layouts:
                target = folder / f"{layout.id:06d}.tide"
                step = self._link(layout, sums[layout.id], target) if layout.id in linked else None
                if step is None:
                    step = self._copy(pool, layout, sums[layout.id], target)
                kind = kind_of(layout, self._ranks.rank)
                stored.append(
                    Stored(target.name, step, layout.numel, kind.weight_format, kind.state_bytes, layout.segments)
                )
        return stored

    def _linkable(self, folder: Path, sums: Sequence[int]) -> dict[int, int]:
        """Bytes of the files that can be linked, by subgroup."""
        found, device = {}, folder.stat().st_dev
        for layout in self._contents.engine.layouts:
            lives = self._contents.engine.memory.residence[layout.id]
            if self._store is not None and is_path(lives) and isinstance(self._store.paths[lives], StoragePath):
                nbytes = self._files_of(lives).link_bytes(layout.id, sums[layout.id], device)
                if nbytes is not None:
                    found[layout.id] = nbytes
        return found

    def _make_room(self, folder: Path, linked: Mapping[int, int], copied: Sequence[Layout]) -> None:
        """Spares for what will be linked, from expiring checkpoints where they have such files. PathFull, with nothing
        changed, when those and the copies do not fit."""
        donors = self._donors(folder)
        made: defaultdict[str, list[Layout]] = defaultdict(list)
        needed = sum(_file_bytes(kind_of(layout, self._ranks.rank)) for layout in copied)
        for layout in self._contents.engine.layouts:
            lives = self._contents.engine.memory.residence[layout.id]
            if layout.id not in linked or self._files_of(lives).has_spare(layout.id):
                continue
            if donors[linked[layout.id]]:
                self._promised.append((layout, lives, donors[linked[layout.id]].pop()))
            else:
                made[lives].append(layout)
                needed += linked[layout.id]
        count = sum(map(len, made.values()))
        _check_room(f"in {folder.parent.parent}", needed, free_bytes(folder), len(copied), count)
        for name, layouts in made.items():
            path, spares = self._files_of(name), sum(linked[layout.id] for layout in layouts)
            _check_room(f"of what is on path {name}", spares, path.free_bytes, 0, len(layouts))
        for name, layouts in made.items():
            for layout in layouts:
                self._files_of(name).add_spare(layout.id)

    def _donors(self, folder: Path) -> defaultdict[int, list[Path]]:
        """State files that nothing else holds, and that nobody needs once this checkpoint is complete; by size."""
        found: defaultdict[int, list[Path]] = defaultdict(list)
        device = folder.stat().st_dev
        for checkpoint in self._expiring:
            for stored in checkpoint.manifest.subgroups:
                path = checkpoint.folder / stored.file
                with suppress(FileNotFoundError):
                    about = path.lstat()
                    if about.st_nlink == 1 and about.st_dev == device:
                        found[about.st_size].append(path)
        return found

    def _link(self, layout: Layout, weights: int, target: Path) -> int | None:
        """The step of the state, None when the file system would not link it."""
        path = self._files_of(self._contents.engine.memory.residence[layout.id])
        return path.step_of(layout.id) if path.link(layout.id, weights, target) else None

    def _files_of(self, path: str) -> StoragePath:
        """The path that holds what is linked."""
        assert self._store is not None, "files are a path's"
        found = self._store.paths[path]
        assert isinstance(found, StoragePath), "only files can be linked"
        return found

    def _copy(self, pool: IoPool, layout: Layout, weights: int, target: Path) -> int:
        kind = kind_of(layout, self._ranks.rank)
        with self._contents.engine.memory.arrays(layout.id, changed=False) as arrays:
            # One block of whole pages, which begins with the first array.
            address = arrays["exp_avg"].data_ptr()
            fill(address + kind.data_bytes, 0, padded_bytes(kind.data_bytes) - kind.data_bytes)
            self._write_file(pool, target, kind, address, weights)
        return self._contents.step

    def _write_file(self, pool: IoPool, target: Path, kind: StateKind, address: int, weights: int) -> None:
        nbytes = padded_bytes(kind.data_bytes)
        checksums = np.zeros(num_blocks(nbytes, BLOCK_BYTES), np.uint32)
        fd, _ = open_direct(target, write=True, create=True)
        try:
            reserve(fd, _file_bytes(kind))
            ticket = finish(pool.write(fd, address, nbytes, header_bytes(len(checksums)), BLOCK_BYTES, checksums))
            if not ticket.ok:
                code = ticket.error or errno.EIO
                raise OSError(code, os.strerror(code), os.fspath(target))
            blocks = tuple(map(int, checksums))
            write_header(fd, Header(kind, self._run_id.bytes, self._contents.step, BLOCK_BYTES, blocks, weights))
        finally:
            os.close(fd)

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


def _check_room(where: str, needed: int, free: int, copies: int, spares: int) -> None:
    if needed > free:
        raise PathFull(
            f"A checkpoint {where} needs {needed:,} bytes more, {free:,} are free: for copies of {copies} subgroups "
            f"and {spares} spare files, as what is linked is never written to again. Free space, keep fewer "
            "checkpoints, or save to another file system.",
            needed, free,
        )  # fmt: skip


def _make(folder: Path) -> None:
    """With its parent, which another rank may be removing right now, as an empty one."""
    while True:
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            return


def _file_bytes(kind: StateKind) -> int:
    return file_bytes(kind.data_bytes, BLOCK_BYTES)


def _sync_all(folder: Path) -> None:
    """All files in it, and all names; what a user's `save_also` has written too."""
    for at, _, names in os.walk(folder):
        for name in names:
            sync(Path(at, name))
        sync(Path(at))
    sync(folder.parent)
