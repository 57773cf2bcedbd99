"""Loads a checkpoint. The running optimizer may divide the parameters into other subgroups than the optimizer that
saved the checkpoint, and may store their state on other paths, on the host or on the device."""

from __future__ import annotations

import io
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from tidegate.agent.checkpoints.checkpoint import Checkpoint
from tidegate.agent.checkpoints.manifest import OPTIMIZER_FILE, ParamForm, StoredSubgroup
from tidegate.agent.checkpoints.state_copies import THREADS, weights_checksum
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.state_block import state_arrays
from tidegate.agent.parameters.subgroups import Format, Segment
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.plain_files import open_plain
from tidegate.agent.tiers.state_file import PAGE_BYTES, Header, bytes_to_read, padded_bytes
from tidegate.agent.tiers.state_reads import read_blocks
from tidegate.errors import CheckpointFailed, DataTruncated, FileDamaged, ForeignState
from tidegate.kernels import GradDtype, IoPool, WeightFormat, aligned_buffer, open_direct
from tidegate.rules.rule import tensors_text


class Reader:
    """Reads one rank's part of a checkpoint for the parameters of the running optimizer. A context manager."""

    def __init__(self, checkpoint: Checkpoint, engine: Engine, ranks: Ranks) -> None:
        """Checks the checkpoint against the parameters and the update rule of `engine`, except the data of the state
        files. The optimizer is not changed.

        ForeignState when model, update rule or number of ranks differ; WeightsMismatch when the model's weights are not
        the ones that were saved with the state; other errors of `StateFileError` for damage.
        """
        self._checkpoint, self._params, self._rule = checkpoint, engine.shards, engine.rule
        self._check_fits(ranks)
        with checkpoint_failed_on_error(checkpoint.folder):
            checkpoint.verify()
        self._headers = [self._header(i, stored) for i, stored in enumerate(checkpoint.manifest.subgroups)]
        self._parts: defaultdict[int, list[tuple[int, Segment]]] = defaultdict(list)
        for i, stored in enumerate(checkpoint.manifest.subgroups):
            for segment in stored.segments:
                self._parts[segment.param].append((i, segment))
        self._pool = IoPool(THREADS)
        self._buffer = aligned_buffer(max([PAGE_BYTES, *(padded_bytes(h.data_bytes) for h in self._headers)]))
        self._read: tuple[int, dict[str, torch.Tensor]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def optimizer(self) -> dict[str, Any]:
        """Reads the optimizer's state besides the subgroups (param groups, step counts) and verifies its checksum."""
        data = read_optimizer(self._checkpoint)
        loaded: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        return loaded

    def scatter(self, engine: Engine) -> None:
        """Copies the saved state into the engine's subgroups, on the device, the host or a path. Every block is
        verified when it is read. BlockDamaged or DataTruncated when a block is damaged; part of the state is then
        already replaced."""
        for layout in engine.layouts:
            with engine.memory.arrays(layout.id) as arrays:
                for wanted in layout.segments:
                    for index, part in self._overlapping(wanted):
                        first = max(wanted.offset, part.offset)
                        numel = min(wanted.offset + wanted.numel, part.offset + part.numel) - first
                        to, given = wanted.start + first - wanted.offset, part.start + first - part.offset
                        for name, array in self._arrays(index).items():
                            arrays[name][to : to + numel] = array[given : given + numel]

    def _overlapping(self, wanted: Segment) -> Iterator[tuple[int, Segment]]:
        """Yields the saved segments that overlap `wanted`, a segment of the running optimizer, each with the index of
        its state file. The saved and the running optimizer list the parameters in the same order, so each state file is
        read only once, one after the other."""
        for index, part in self._parts[wanted.param]:
            if part.offset < wanted.offset + wanted.numel and wanted.offset < part.offset + part.numel:
                yield index, part

    def _arrays(self, index: int) -> dict[str, torch.Tensor]:
        """Reads one state file and returns its arrays. The last file is kept in memory and not read again."""
        if self._read is None or self._read[0] != index:
            self._read = None
            header = self._headers[index]
            self._fetch(self._path(index), header)
            block = torch.from_numpy(self._buffer)
            weight = list(WeightFormat)[header.kind.weight_format]
            self._read = index, state_arrays(block, header.kind.numel, Format(weight, GradDtype.F32, self._rule))
        return self._read[1]

    def _fetch(self, path: Path, header: Header) -> None:
        """Reads the data of a state file into the buffer and verifies its blocks. BlockDamaged, DataTruncated or
        CheckpointFailed when that fails."""
        with checkpoint_failed_on_error(path):
            fd, _ = open_direct(path)
            try:
                address = self._buffer.ctypes.data
                read_blocks(self._pool, fd, path, header, 0, padded_bytes(header.data_bytes), address)
            finally:
                os.close(fd)

    # ---- checks, before anything is changed

    def _check_fits(self, ranks: Ranks) -> None:
        """Raises ForeignState if update rule, number of ranks or parameters differ from those of the checkpoint."""
        manifest, name = self._checkpoint.manifest, self._checkpoint.directory
        rule = self._rule
        if (manifest.rule, manifest.tensors, manifest.ranks) != (rule.stored_as, rule.tensors, ranks.count):
            found = f"{manifest.rule} ({tensors_text(manifest.tensors)}) of {manifest.ranks} ranks"
            raise ForeignState(name, found, f"{rule.stored_as} ({rule.tensors_text}) of {ranks.count}")
        mine = [ParamForm.of(param) for param in self._params]
        if len(mine) != len(manifest.params):
            raise ForeignState(name, f"{len(manifest.params)} parameters", f"{len(mine)}")
        for index, (saved, wanted) in enumerate(zip(manifest.params, mine, strict=True)):
            if saved != wanted:
                raise ForeignState(name, f"parameter {index} as {saved}", wanted)

    def _header(self, index: int, stored: StoredSubgroup) -> Header:
        """Reads the header of a state file and checks it against the manifest and the model's weights."""
        path, header = self._path(index), read_header(self._checkpoint, index)
        with checkpoint_failed_on_error(path):
            header.check_file(path.stat().st_size, path)
        header.check_weights(weights_checksum(self._params, stored.segments), path)
        return header

    def _path(self, index: int) -> Path:
        return self._checkpoint.folder / self._checkpoint.manifest.subgroups[index].file


def read_optimizer(checkpoint: Checkpoint) -> bytes:
    """Reads the file with the optimizer's state besides the subgroups. FileDamaged when its checksum is wrong,
    `StateFileError` when it is missing."""
    path, expected = checkpoint.folder / OPTIMIZER_FILE, checkpoint.manifest.optimizer_crc
    with checkpoint_failed_on_error(path), open_plain(path) as file:
        data = file.read()
    if zlib.crc32(data) != expected:
        raise FileDamaged(path, f"checksum {zlib.crc32(data):#010x}", f"{expected:#010x}")
    return data


def read_header(checkpoint: Checkpoint, index: int) -> Header:
    """Reads the header of the state file of one subgroup. `StateFileError` when the header is damaged, the file is
    missing, or the header is not the one that the manifest says."""
    manifest = checkpoint.manifest
    stored, path = manifest.subgroups[index], checkpoint.folder / manifest.subgroups[index].file
    with checkpoint_failed_on_error(path), open_plain(path) as file:
        first = file.read(PAGE_BYTES)
        # A damaged number of blocks may ask for more bytes than the file has.
        nbytes = min(bytes_to_read(first, path), os.fstat(file.fileno()).st_size)
        header = Header.unpack(first + file.read(max(nbytes - len(first), 0)), path)
    header.check_run(bytes.fromhex(manifest.run_id), path)
    header.check_kind(manifest.kind(index), path)
    header.check_step(stored.step, path)
    return header


@contextmanager
def checkpoint_failed_on_error(path: Path) -> Iterator[None]:
    """Context manager that converts OSError of a read: to DataTruncated for a missing file, to CheckpointFailed
    otherwise."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataTruncated(path, "no file", "a state file") from error
    except OSError as error:
        raise CheckpointFailed(
            f"{path} cannot be read: {error.strerror}. Solve this problem, then load the checkpoint again."
        ) from error
