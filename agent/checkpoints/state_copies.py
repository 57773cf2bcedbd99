"""Writes the state of all subgroups into a checkpoint, one file per subgroup. Each file is hard-linked from a storage
path, copied at once, or copied later in the background from a file that is held open or from host memory."""

from __future__ import annotations

import ctypes
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tidegate.agent.checkpoints.manifest import StoredSubgroup
from tidegate.agent.checkpoints.snapshot import BLOCK_BYTES, StateInMemory, StateSource, write_state
from tidegate.agent.checkpoints.spare_files import SpareFiles
from tidegate.agent.engine.engine import Engine
from tidegate.agent.parameters.subgroups import Layout, Segment, flat
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.state_file import Header, num_blocks, padded_bytes
from tidegate.agent.tiers.tier_store import state_kind
from tidegate.kernels import IoPool, aligned_buffer, crc32c, fill
from tidegate.plan.ops import is_path

log = logging.getLogger("tidegate.tiers")

THREADS: Final = 4
"""Number of I/O threads for the state files of a checkpoint: the number of blocks that are written or read at the same
time."""


def weights_checksum(params: Sequence[torch.Tensor], segments: Sequence[Segment]) -> int:
    """CRC-32C of the weights of one subgroup."""
    checksum = 0
    for s in segments:
        weights = flat(params[s.param])[s.offset : s.offset + s.numel].cpu()
        checksum = crc32c(weights.data_ptr(), weights.numel() * weights.element_size(), checksum)
    return checksum


def file_name(layout: Layout) -> str:
    """File name of a subgroup's state in a checkpoint."""
    return f"{layout.id:06d}.tide"


@dataclass(frozen=True, slots=True)
class BackgroundCopies:
    """Subgroups whose state is copied in the background: `held` ones from their file on a path, `in_memory` ones from a
    copy in host memory. All other subgroups are linked or copied immediately."""

    held: frozenset[int] = frozenset()
    in_memory: frozenset[int] = frozenset()


class StateCopies:
    """Writes one rank's state of all subgroups into the folder of a checkpoint."""

    def __init__(
        self,
        engine: Engine,
        params: Sequence[torch.Tensor],
        step: int,
        run_id: uuid.UUID,
        rank: int,
        device: int,
    ) -> None:
        """step: number of the optimizer's updates.
        run_id: id of the run, which is written into each file.
        rank: number of this rank.
        device: device number (`st_dev`) of the checkpoint's file system. Only files on this file system can be
            hard-linked.
        """
        self._engine, self._step, self._run_id, self._rank = engine, step, run_id, rank
        self._sums = [weights_checksum(params, layout.segments) for layout in engine.layouts]
        self._linkable = self._find_linkable(device)
        """Sizes in bytes of the files that can be linked, by subgroup."""

    def plan_background(self, memory_bytes: int) -> BackgroundCopies:
        """Chooses the subgroups that can be copied in the background. `memory_bytes`: limit of host memory for
        copies."""
        held, in_memory = set(), set()
        for layout in self._engine.layouts:
            if layout.id in self._linkable:
                continue
            path = self._path(layout)
            if path is not None and path.states[layout.id].step >= 0:
                held.add(layout.id)
                continue
            nbytes = padded_bytes(state_kind(layout, self._rank).data_bytes)
            if nbytes <= memory_bytes:
                memory_bytes -= nbytes
                in_memory.add(layout.id)
        return BackgroundCopies(frozenset(held), frozenset(in_memory))

    def put(
        self, folder: Path, spares: SpareFiles, background: BackgroundCopies, pending: list[tuple[StateSource, Path]]
    ) -> Iterator[StoredSubgroup]:
        """Links, holds or copies the state of each subgroup, and yields the entries of the manifest. State that the
        background thread must write is added to `pending`, with its target file."""
        layouts = self._engine.layouts
        copied = [layout for layout in layouts if layout.id not in self._linkable]
        spares.reserve(folder, self._linkable, copied)
        held = frozenset(s for s in background.held if spares.add_for(layouts[s]))
        if len(held) < len(background.held):
            log.warning(
                "checkpoint %s: %d of %d subgroups are copied while training waits, because spare files for them could "
                "not be created on their paths (no space, or no free file descriptor)",
                folder.parent, len(background.held) - len(held), len(background.held),
            )  # fmt: skip
        with IoPool(THREADS) as pool:
            for layout in layouts:
                kind, target = state_kind(layout, self._rank), folder / file_name(layout)
                step = self._link(layout, target)
                if step is None and layout.id in held:
                    step = self._hold(layout, target, pending)
                if step is None:
                    step = self._copy(pool, layout, target, pending if layout.id in background.in_memory else None)
                yield StoredSubgroup(
                    target.name, step, layout.numel, kind.weight_format, kind.state_bytes, layout.segments
                )

    def _path(self, layout: Layout) -> StoragePath | None:
        """The path that stores the subgroup's state, if that path stores files. None for state on the device, on the
        host or in an object store."""
        residence, store = self._engine.memory.residence[layout.id], self._engine.store
        path = store.paths[residence] if store is not None and is_path(residence) else None
        return path if isinstance(path, StoragePath) else None

    def _find_linkable(self, device: int) -> dict[int, int]:
        """Files that can be hard-linked into the checkpoint: size in bytes by subgroup."""
        linkable = {}
        for layout in self._engine.layouts:
            path = self._path(layout)
            nbytes = path.linkable_bytes(layout.id, self._sums[layout.id], device) if path is not None else None
            if nbytes is not None:
                linkable[layout.id] = nbytes
        return linkable

    def _link(self, layout: Layout, target: Path) -> int | None:
        """Hard-links the subgroup's file to `target`. Returns the number of the update that its state belongs to; None
        when the file cannot be linked."""
        path = self._path(layout)
        if path is None or layout.id not in self._linkable:
            return None
        return path.states[layout.id].step if path.hard_link(layout.id, self._sums[layout.id], target) else None

    def _hold(self, layout: Layout, target: Path, pending: list[tuple[StateSource, Path]]) -> int:
        """Holds the subgroup's file open for the background copy. Returns the number of the update that its state
        belongs to."""
        path = self._path(layout)
        assert path is not None, "only state in files is held"
        pending.append((path.hold(layout.id, self._sums[layout.id]), target))
        return path.states[layout.id].step

    def _copy(self, pool: IoPool, layout: Layout, target: Path, pending: list[tuple[StateSource, Path]] | None) -> int:
        """Copies the subgroup's state to the file `target`. If `pending` is given, the state is copied to memory
        instead and added to `pending`. Returns the number of the update that the state belongs to."""
        kind, run_id = state_kind(layout, self._rank), self._run_id.bytes
        unknown = (0,) * num_blocks(kind.data_bytes, BLOCK_BYTES)
        header = Header(kind, run_id, self._step, BLOCK_BYTES, unknown, self._sums[layout.id])
        nbytes = padded_bytes(kind.data_bytes)
        with self._engine.memory.arrays(layout.id, changed=False) as arrays:
            # The arrays are one block of whole pages; one of them is at its begin.
            address = min((array.data_ptr() for array in arrays.values()), default=0)
            fill(address + kind.data_bytes, 0, nbytes - kind.data_bytes)
            if pending is None:
                write_state(pool, StateInMemory(header, address, arrays), target)
            else:
                copy = aligned_buffer(max(nbytes, 1))
                ctypes.memmove(copy.ctypes.data, address, nbytes)
                pending.append((StateInMemory(header, copy.ctypes.data, copy), target))
        return self._step
