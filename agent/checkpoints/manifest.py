"""Which checkpoints lie in a directory, and what each rank's part says of itself.

    <directory>/step-<n>/rank<k>.json          the manifest of one rank: written last, renamed into its place
    <directory>/step-<n>/rank<k>-<attempt>/    what it names: a state file for each subgroup, optimizer.pt, the user's

A checkpoint is complete when the manifests of all its ranks are there, of one attempt. A folder that no manifest names
is what an interrupted one left. Checkpoints are numbered in the order in which they were made, the highest number is
the newest: who goes back to an earlier step and trains on from there wants that. A complete one is never written to: a
second one of the same step is `step-<n>.<number>`.

One that is damaged is for people to look at: it is listed with the reason, and everything else goes on around it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import torch

from tidegate.agent.checkpoints import manifest_schema as schema
from tidegate.agent.checkpoints.manifest_schema import Fields, WrongManifestError, canonical
from tidegate.agent.checkpoints.saved_files import SavedFile, say_unknown, verify
from tidegate.agent.parameters.subgroups import Segment
from tidegate.agent.tiers.plain_files import is_directory, open_plain, require_directory
from tidegate.errors import (
    DataTruncated,
    FileUnreadable,
    ForeignByteOrder,
    ManifestDamaged,
    NewerFormat,
    NoCheckpoint,
    PathUnusable,
    StateFileError,
    UnknownChecksum,
)
from tidegate.kernels import WeightFormat
from tidegate.logs import event

log = logging.getLogger("tidegate.tiers")

VERSION: Final = 2
"""Later ones keep the envelope, `crc32` of the canonical text of `checkpoint`, or leave `crc32` out: a version that is
higher below a wrong checksum is damage."""
VERSION_WITHOUT_FILES: Final = 1
"""Knew nothing of what `save_also` wrote."""
MOST_MANIFEST_BYTES: Final = 1 << 30
"""A manifest of a million subgroups is a quarter of it."""
STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)(\.[1-9][0-9]*)?")
MANIFEST_NAME: Final = re.compile(r"rank(0|[1-9][0-9]*)\.json")
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
    files: tuple[SavedFile, ...] | None = ()
    """What `save_also` wrote. None in a checkpoint of before they were noted."""

    @property
    def folder(self) -> str:
        """The name of the folder with the files, beside the manifest."""
        return folder_name(self.rank, self.attempt)

    @property
    def own_files(self) -> frozenset[str]:
        """Names of the files in the folder that are not the user's."""
        return frozenset((OPTIMIZER_FILE, *(stored.file for stored in self.subgroups)))

    def pack(self) -> bytes:
        body = canonical({"version": VERSION, **asdict(self)})
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> Self:
        """ManifestDamaged when it is not what was written, NewerFormat when a later Tidegate wrote it."""
        try:
            return cls._unpacked(data, file)
        except WrongManifestError as error:
            raise ManifestDamaged(file, error.found, error.expected) from error

    @classmethod
    def _unpacked(cls, data: bytes, file: Path) -> Self:
        outer = schema.parse(data)
        if not isinstance(outer, dict) or not isinstance(values := outer.get("checkpoint"), dict):
            raise WrongManifestError(f"{len(data):,} bytes that are no manifest", "one")
        version, expected = values.get("version"), outer.get("crc32")
        found = zlib.crc32(canonical(values).encode())
        is_right = type(expected) is int and found == expected
        if type(version) is int and version > VERSION and (is_right or "crc32" not in outer):
            raise NewerFormat(file, f"version {version:#x}", f"at most {VERSION:#x}")
        if not is_right:
            raise WrongManifestError(f"checksum {found:#010x}", schema.shown(expected))
        fields = Fields(values, "")
        made = cls._read(fields, fields.number("version", VERSION_WITHOUT_FILES, VERSION))
        fields.end()
        return made

    @classmethod
    def _read(cls, fields: Fields, version: int) -> Self:
        ranks = fields.number("ranks", 1)
        made = cls(
            step=fields.number("step"),
            number=fields.number("number", 1),
            attempt=fields.text("attempt", schema.ATTEMPT),
            run_id=fields.text("run_id", schema.RUN_ID),
            rank=fields.number("rank", most=ranks - 1),
            ranks=ranks,
            rule=fields.text("rule", schema.RULE),
            params=fields.each("params", _read_param),
            subgroups=fields.each("subgroups", _read_stored),
            optimizer_crc=fields.number("optimizer_crc", most=schema.MOST_CHECKSUM),
            files=fields.each("files", _read_saved) if version > VERSION_WITHOUT_FILES else None,
        )
        for index, one in enumerate(made.subgroups):
            schema.check_subgroup(index, one.file, one.numel, one.state_bytes, one.weight_format, one.segments)
        segments = [segment for stored in made.subgroups for segment in stored.segments]
        schema.check_all_there([param.shape for param in made.params], segments)
        return made


def _read_param(fields: Fields) -> ParamForm:
    return ParamForm(fields.text("dtype", schema.DTYPE), fields.numbers("shape"), fields.numbers("strides"))


def _read_stored(fields: Fields) -> Stored:
    return Stored(
        file=fields.path("file"),
        step=fields.number("step"),
        numel=fields.number("numel", 1),
        weight_format=fields.number("weight_format", most=len(WeightFormat) - 1),
        state_bytes=fields.number("state_bytes", 1),
        segments=fields.each("segments", schema.read_segment),
    )


def _read_saved(fields: Fields) -> SavedFile:
    return SavedFile(fields.path("file"), fields.number("nbytes"), fields.text("sha256", schema.SHA256))


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

    def verify(self) -> None:
        """Holds what `save_also` wrote against its checksums: all of it is read. `load_checkpoint` does so too; whoever
        loads weights before calls this before.

        FileDamaged, DataTruncated or StrangeEntry when a file is not as it was written, FileUnreadable when the system
        refuses to read it. What a Tidegate of before wrote has no checksums, which is said once.
        """
        with readable(self.folder):
            require_directory(self.folder)
            if self.manifest.files is None:
                say_unknown(self.folder, self.manifest.own_files)
            else:
                verify(self.folder, self.manifest.files)

    def __repr__(self) -> str:
        return f"Checkpoint({self.directory}, step {self.step}, rank {self.manifest.rank})"


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """One that cannot be used, and why. Nothing but `tidegate doctor` removes it."""

    directory: Path
    reason: StateFileError

    @property
    def is_removable(self) -> bool:
        """False for what may be sound: written by a newer Tidegate or on another kind of machine, or not to be read
        for now."""
        return not isinstance(self.reason, NewerFormat | UnknownChecksum | ForeignByteOrder | FileUnreadable)

    def __repr__(self) -> str:
        return f"DamagedCheckpoint({self.directory}, {self.reason})"


def find_checkpoints(directory: str | os.PathLike[str], rank: int = 0) -> list[Checkpoint]:
    """All complete checkpoints in `directory`, the newest first, as `rank` sees them. None when there is no directory.

    Those with a damaged manifest are left out, with a warning: see `find_damaged_checkpoints`. PathUnusable when the
    directory cannot be read.
    """
    return survey(Path(directory), rank)[0]


def find_damaged_checkpoints(directory: str | os.PathLike[str]) -> list[DamagedCheckpoint]:
    """Those in `directory` that have a manifest, of whatever rank, that cannot be used, by their names. What is only
    seen in the data is not among them: `tidegate doctor --checkpoints` reads these.
    """
    return survey(Path(directory), 0)[1]


def survey(directory: Path, rank: int) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """The complete ones, the newest first, and the damaged ones, of which it is warned once in a process."""
    good, damaged = [], []
    for step in step_entries(directory):
        try:
            manifests = manifests_of(step)
        except FileNotFoundError:  # its run removes it right now
            continue
        except StateFileError as reason:
            damaged.append(DamagedCheckpoint(step, reason))
        else:
            good += [Checkpoint(step, one) for one in manifests if one.rank == rank] if has_all_ranks(manifests) else []
    for one in damaged:
        warn(one)
    return sorted(good, key=lambda one: -one.manifest.number), damaged


def manifests_of(step: Path) -> list[Manifest]:
    """Those of all ranks that have written theirs, in this directory of a checkpoint. `StateFileError` when one of them
    cannot be used, FileNotFoundError when it is removed meanwhile."""
    with readable(step):
        return _manifests_of(step)


def _manifests_of(step: Path) -> list[Manifest]:
    require_directory(step)
    found = []
    for path in sorted(path for path in step.iterdir() if MANIFEST_NAME.fullmatch(path.name)):
        manifest = read_manifest(path)
        if path != manifest_path(step, manifest.rank):
            raise ManifestDamaged(path, f"that of rank {manifest.rank}", path.stem)
        if step.name.partition(".")[0] != f"step-{manifest.step}":
            raise ManifestDamaged(path, f"that of step {manifest.step}", step.name)
        found.append(manifest)
    if has_all_ranks(found):
        for manifest in found:
            folder = step / manifest.folder
            try:
                require_directory(folder)
            except FileNotFoundError as error:
                if not manifest_path(step, manifest.rank).exists():
                    raise
                raise DataTruncated(folder, "no folder", "one") from error
    return found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """FileUnreadable for OSError; FileNotFoundError as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileUnreadable(error.filename or path, error) from error


_warned: set[tuple[str, str]] = set()
"""Damaged checkpoints that this process warned of, with the reason."""


def warn(damaged: DamagedCheckpoint) -> None:
    """Once in a process."""
    if (about := (str(damaged.directory), str(damaged.reason))) not in _warned:
        _warned.add(about)
        is_damaged = damaged.is_removable
        log.warning(
            "checkpoint %s is %sleft out: %s `tidegate doctor --checkpoints %s` lists %ssuch.",
            damaged.directory, "damaged and " if is_damaged else "", damaged.reason, damaged.directory.parent,
            "and removes " if is_damaged else "",
            extra=event("checkpoint_damaged", checkpoint=str(damaged.directory), reason=str(damaged.reason)),
        )  # fmt: skip


def choose(directory: str | os.PathLike[str], rank: int, step: int | None) -> Checkpoint:
    """The newest complete checkpoint, or that of `step`. NoCheckpoint when there is none, the reason when what there is
    is damaged."""
    found, damaged = survey(Path(directory), rank)
    for one in found:
        if step in (None, one.step):
            return one
    if reasons := [one for one in damaged if step in (None, _step_of(one.directory))]:
        raise max(reasons, key=lambda one: _step_of(one.directory)).reason
    wanted = "No complete checkpoint" if step is None else f"No complete checkpoint of step {step}"
    steps = ", ".join(str(one.step) for one in found)
    broken = f"; damaged: {', '.join(one.directory.name for one in damaged)}" if damaged else ""
    where = f"{wanted} of rank {rank} is in {Path(directory).absolute()}"
    raise NoCheckpoint(f"{where}; steps there: {steps or 'none'}{broken}.")


def _step_of(directory: Path) -> int:
    """As its name says."""
    return int(directory.name.removeprefix("step-").partition(".")[0])


def step_entries(directory: Path) -> list[Path]:
    """What has the name of a checkpoint, whatever it is. PathUnusable when nobody can tell."""
    try:
        return sorted(path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PathUnusable(
            f"{directory} cannot be read: {error.strerror}. Give the directory that checkpoints were saved to."
        ) from error


def step_directories(directory: Path) -> Iterator[Path]:
    """Directories of checkpoints; no links to some elsewhere, nor what nobody can look at."""
    for path in step_entries(directory):
        with suppress(OSError):
            if is_directory(path):
                yield path


def folder_name(rank: int, attempt: str) -> str:
    return f"rank{rank}-{attempt}"


def manifest_path(step_directory: Path, rank: int) -> Path:
    return step_directory / f"rank{rank}.json"


def read_manifest(path: Path) -> Manifest:
    """FileNotFoundError when there is none, `StateFileError` when it cannot be used."""
    with readable(path), open_plain(path) as file:
        data = file.read(MOST_MANIFEST_BYTES + 1)
    if len(data) > MOST_MANIFEST_BYTES:
        raise ManifestDamaged(path, f"more than {MOST_MANIFEST_BYTES:,} bytes", "fewer")
    return Manifest.unpack(data, path)


def publish(step_directory: Path, manifest: Manifest) -> Path:
    """Makes this rank's part exist, in one moment: what it names must be on the disk already."""
    path = manifest_path(step_directory, manifest.rank)
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
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
    """Folders of this rank that no manifest names, and directories of steps that are empty then. What Tidegate does not
    make is left, and nothing is removed through a link. One that cannot be read or written keeps nobody from saving
    others."""
    for step in list(step_directories(directory)):
        with suppress(OSError):
            _remove_remains_of(step, rank)


def _remove_remains_of(step: Path, rank: int) -> None:
    named = _named(manifest_path(step, rank))
    with suppress(FileNotFoundError, IsADirectoryError):
        manifest_path(step, rank).with_suffix(".new").unlink()
    for folder in step.glob(f"rank{rank}-*"):
        attempt = folder.name.removeprefix(f"rank{rank}-")
        ours = schema.ATTEMPT.fullmatch(attempt) and is_directory(folder)
        if ours and named is not None and folder.name not in named:
            _remove_tree(folder)
    with suppress(OSError):  # of other ranks, or of the user
        step.rmdir()


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("what an interrupted or expired checkpoint left in %s stays behind: %s", folder, error)


def _named(manifest: Path) -> Sequence[str] | None:
    """The folder that a manifest names; none when it is missing, None when nobody can tell."""
    try:
        return [read_manifest(manifest).folder]
    except FileNotFoundError:
        return []
    except StateFileError:
        return None


def sync(path: Path) -> None:
    """What is in this file, or the names in this directory, will be there after a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget_overtaken(
    directory: Path, complete: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint], rank: int
) -> None:
    """Retracts what this rank has written of checkpoints that other ranks never completed, before the newest of the
    `complete` ones. Of `damaged` ones nobody can tell whether they were complete."""
    newest = max((one.manifest.number for one in complete), default=0)
    known: Iterable[Checkpoint | DamagedCheckpoint] = (*complete, *damaged)
    left = {one.directory for one in known}
    for step in list(step_directories(directory)):
        with suppress(OSError, StateFileError):
            if step not in left and (manifest := read_manifest(manifest_path(step, rank))).number <= newest:
                retract(Checkpoint(step, manifest))


def has_all_ranks(manifests: Sequence[Manifest]) -> bool:
    """Whether they are those of all ranks, of one attempt."""
    if not manifests or len({(manifest.attempt, manifest.ranks) for manifest in manifests}) > 1:
        return False
    return len({manifest.rank for manifest in manifests}) == len(manifests) == manifests[0].ranks
