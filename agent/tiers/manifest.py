"""Which checkpoints lie in a directory, and what each rank's part says of itself.

    <directory>/step-<n>/rank<k>.json          the manifest of one rank: written last, renamed into its place
    <directory>/step-<n>/rank<k>-<attempt>/    what it names: a state file for each subgroup, optimizer.pt, the user's

A checkpoint is complete when the manifests of all its ranks are there, of one attempt. A folder that no manifest names
is what an interrupted one left. Checkpoints are numbered in the order in which they were made, the highest number is
the newest: who goes back to an earlier step and trains on from there wants that. A complete one is never written to: a
second one of the same step is `step-<n>.<number>`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from tidegate.agent.subgroups import Segment
from tidegate.errors import ManifestDamaged, NewerFormat, NoCheckpoint

VERSION: Final = 1
STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)(\.[1-9][0-9]*)?")
OPTIMIZER_FILE: Final = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ParamForm:
    """What must be equal for the state of one parameter to fit another."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of dimensions longer than 1; state lies in the order of the weight's memory."""

    @classmethod
    def of(cls, param: torch.Tensor) -> Self:
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return cls(str(param.dtype).removeprefix("torch."), tuple(param.shape), strides)


@dataclass(frozen=True, slots=True)
class Stored:
    """One subgroup in a checkpoint: its file, and which parts of which parameters it holds."""

    file: str
    step: int
    numel: int
    weight_format: int
    state_bytes: int
    """Per parameter."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank has written. `step` counts the updates of the optimizer."""

    step: int
    number: int
    """Of the checkpoint in its directory, from 1; later ones have higher numbers."""
    attempt: str
    run_id: str
    rank: int
    ranks: int
    rule: str
    params: tuple[ParamForm, ...]
    subgroups: tuple[Stored, ...]
    optimizer_crc: int

    @property
    def folder(self) -> str:
        """The name of the folder with the files, beside the manifest."""
        return folder_name(self.rank, self.attempt)

    def pack(self) -> bytes:
        body = _canonical({"version": VERSION, **asdict(self)})
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> Self:
        """ManifestDamaged when it is not what was written, NewerFormat when a later Tidegate wrote it."""
        try:
            outer = json.loads(data)
            values, expected = outer["checkpoint"], outer["crc32"]
            version = values.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestDamaged(file, f"{len(data):,} bytes that cannot be read", "a manifest") from error
        if version > VERSION:
            raise NewerFormat(file, f"version {version}", f"at most {VERSION}")
        found = zlib.crc32(_canonical({"version": version, **values}).encode())
        if found != expected:
            raise ManifestDamaged(file, f"checksum {found:#010x}", f"{expected:#010x}")
        params = tuple(ParamForm(p["dtype"], tuple(p["shape"]), tuple(p["strides"])) for p in values.pop("params"))
        subgroups = tuple(
            Stored(**stored | {"segments": tuple(Segment(**segment) for segment in stored["segments"])})
            for stored in values.pop("subgroups")
        )
        return cls(**values, params=params, subgroups=subgroups)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One rank's part of a complete checkpoint."""

    directory: Path
    """Of the checkpoint, `step-<n>`."""
    manifest: Manifest

    @property
    def step(self) -> int:
        """Updates that the optimizer had done."""
        return self.manifest.step

    @property
    def folder(self) -> Path:
        """Where this rank's files are, those of the user's `save_also` too."""
        return self.directory / self.manifest.folder

    def __repr__(self) -> str:
        return f"Checkpoint({self.directory}, step {self.step}, rank {self.manifest.rank})"


def find_checkpoints(directory: str | os.PathLike[str], rank: int = 0) -> list[Checkpoint]:
    """All complete checkpoints in `directory`, the newest first, as `rank` sees them. None when there is no directory.

    ManifestDamaged or NewerFormat when one of them has a manifest that cannot be read.
    """
    return _newest_first(_at(step, rank) for step in step_directories(Path(directory)))


def readable_checkpoints(directory: Path, rank: int) -> list[Checkpoint]:
    """As `find_checkpoints`, without those that have a manifest that cannot be read: they are for people to look at."""
    found = []
    for step in step_directories(directory):
        with suppress(ManifestDamaged, NewerFormat):
            found.append(_at(step, rank))
    return _newest_first(found)


def _at(step: Path, rank: int) -> list[Checkpoint]:
    """The checkpoint in this directory, if it is complete."""
    manifests = [read_manifest(path) for path in sorted(step.glob("rank*.json"))]
    return [Checkpoint(step, one) for one in manifests if one.rank == rank] if _complete(manifests) else []


def _newest_first(found: Iterable[list[Checkpoint]]) -> list[Checkpoint]:
    return sorted((one for some in found for one in some), key=lambda one: -one.manifest.number)


def choose(directory: str | os.PathLike[str], rank: int, step: int | None) -> Checkpoint:
    """The newest complete checkpoint, or that of `step`. NoCheckpoint when there is none."""
    found = find_checkpoints(directory, rank)
    for one in found:
        if step in (None, one.step):
            return one
    wanted = "No complete checkpoint" if step is None else f"No complete checkpoint of step {step}"
    steps = ", ".join(str(one.step) for one in found)
    raise NoCheckpoint(f"{wanted} of rank {rank} is in {Path(directory).absolute()}; steps there: {steps or 'none'}.")


def step_directories(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from sorted(path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name) and path.is_dir())


def folder_name(rank: int, attempt: str) -> str:
    return f"rank{rank}-{attempt}"


def manifest_path(step_directory: Path, rank: int) -> Path:
    return step_directory / f"rank{rank}.json"


def read_manifest(path: Path) -> Manifest:
    return Manifest.unpack(path.read_bytes(), path)


def publish(step_directory: Path, manifest: Manifest) -> Path:
    """Makes this rank's part exist, in one moment: what it names must be on the disk already."""
    path = manifest_path(step_directory, manifest.rank)
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        file.write(manifest.pack())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    try:
        sync(step_directory)
    except BaseException:  # nobody knows whether a power cut would undo it: what it names is about to be removed
        path.unlink(missing_ok=True)
        raise
    return path


def retract(checkpoint: Checkpoint) -> None:
    """It is no longer a checkpoint; its files are still there."""
    manifest_path(checkpoint.directory, checkpoint.manifest.rank).unlink(missing_ok=True)
    sync(checkpoint.directory)


def remove_remains(directory: Path, rank: int) -> None:
    """Folders of this rank that no manifest names, and directories of steps that are empty then."""
    for step in step_directories(directory):
        named = _named(manifest_path(step, rank))
        manifest_path(step, rank).with_suffix(".new").unlink(missing_ok=True)
        for folder in step.glob(f"rank{rank}-*"):
            if named is not None and folder.name not in named:
                shutil.rmtree(folder)
        with suppress(OSError):  # of other ranks, or of the user
            step.rmdir()


def _named(manifest: Path) -> Sequence[str] | None:
    """The folder that a manifest names; none when it is missing, None when nobody can tell."""
    try:
        return [read_manifest(manifest).folder]
    except FileNotFoundError:
        return []
    except (ManifestDamaged, NewerFormat):
        return None


def sync(path: Path) -> None:
    """What is in this file, or the names in this directory, will be there after a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget_overtaken(directory: Path, complete: Sequence[Checkpoint], rank: int) -> None:
    """Retracts what this rank has written of checkpoints that other ranks never completed, before the newest of the
    `complete` ones."""
    newest = max((one.manifest.number for one in complete), default=0)
    known = {one.directory for one in complete}
    for step in step_directories(directory):
        with suppress(FileNotFoundError, ManifestDamaged, NewerFormat):
            if step not in known and (manifest := read_manifest(manifest_path(step, rank))).number <= newest:
                retract(Checkpoint(step, manifest))


def _complete(manifests: Sequence[Manifest]) -> bool:
    if not manifests or len({manifest.attempt for manifest in manifests}) > 1:
        return False
    return sorted(manifest.rank for manifest in manifests) == list(range(manifests[0].ranks))


def _canonical(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
