"""Manifests of checkpoints, one per rank, and the list of checkpoints in a directory.

    <directory>/step-<n>/rank<k>.json          manifest of one rank: written last, renamed to this name
    <directory>/step-<n>/rank<k>-<attempt>/    files that it names: state of subgroups, optimizer.pt, user files

A checkpoint is complete when the manifests of all its ranks exist and belong to one attempt. A folder that no manifest
names was left by an interrupted attempt. Checkpoints are numbered in the order in which they were saved, and the
highest number is the newest: this also holds after resuming from an earlier step. A complete checkpoint is never
written to: a second checkpoint of the same step is named `step-<n>.<number>`.

Damaged checkpoints are left for people to examine: they are listed with the reason, and all other checkpoints stay
usable.
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
from tidegate.agent.checkpoints.saved_files import SavedFile, verify, warn_without_checksums
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
"""Version of the format. Later versions keep the outer fields (`crc32` of the canonical text of `checkpoint`) or omit
`crc32`. So a higher version together with a wrong checksum means damage."""
VERSION_WITHOUT_FILES: Final = 1
"""Version of the format without the list of the user's files (`save_also`)."""
MAX_MANIFEST_BYTES: Final = 1 << 30
"""Largest manifest that is read. The manifest of a million subgroups has a quarter of this size."""
STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)(\.[1-9][0-9]*)?")
MANIFEST_NAME: Final = re.compile(r"rank(0|[1-9][0-9]*)\.json")
OPTIMIZER_FILE: Final = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ParamForm:
    """Type and memory layout of a parameter. The saved state of one parameter fits another only if these are equal."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides of the dimensions longer than 1; the state has the order of the weight's memory."""

    @classmethod
    def of(cls, param: torch.Tensor) -> Self:
        """The form of a tensor."""
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return cls(str(param.dtype).removeprefix("torch."), tuple(param.shape), strides)


@dataclass(frozen=True, slots=True)
class StoredSubgroup:
    """Subgroup in a checkpoint: its state file, and the segments of parameters in it."""

    file: str
    step: int
    numel: int
    weight_format: int
    state_bytes: int
    """Bytes of state per parameter."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one rank's part of a checkpoint. `step`: number of updates of the optimizer."""

    step: int
    number: int
    """Sequence number of the checkpoint in its directory, from 1; later checkpoints have higher numbers."""
    attempt: str
    run_id: str
    rank: int
    ranks: int
    rule: str
    params: tuple[ParamForm, ...]
    subgroups: tuple[StoredSubgroup, ...]
    optimizer_crc: int
    files: tuple[SavedFile, ...] | None = ()
    """Files that `save_also` wrote. None in checkpoints of version 1, which do not list them."""

    @property
    def folder(self) -> str:
        """Name of the folder with the files, next to the manifest."""
        return folder_name(self.rank, self.attempt)

    @property
    def own_files(self) -> frozenset[str]:
        """Names of the files in the folder that Tidegate wrote, not the user."""
        return frozenset((OPTIMIZER_FILE, *(stored.file for stored in self.subgroups)))

    def pack(self) -> bytes:
        """The manifest as JSON with its checksum."""
        body = canonical({"version": VERSION, **asdict(self)})
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> Self:
        """Parses and validates a manifest. ManifestDamaged when it is not as it was written, NewerFormat when a later
        version of Tidegate wrote it."""
        try:
            return cls._unpack(data, file)
        except WrongManifestError as error:
            raise ManifestDamaged(file, error.found, error.expected) from error

    @classmethod
    def _unpack(cls, data: bytes, file: Path) -> Self:
        """As `unpack`, but faults of the content raise WrongManifestError."""
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
        manifest = cls._read(fields, fields.number("version", VERSION_WITHOUT_FILES, VERSION))
        fields.require_no_more()
        return manifest

    @classmethod
    def _read(cls, fields: Fields, version: int) -> Self:
        """Takes all values from `fields` and checks that they agree with each other."""
        ranks = fields.number("ranks", 1)
        manifest = cls(
            step=fields.number("step"),
            number=fields.number("number", 1),
            attempt=fields.text("attempt", schema.ATTEMPT),
            run_id=fields.text("run_id", schema.RUN_ID),
            rank=fields.number("rank", most=ranks - 1),
            ranks=ranks,
            rule=fields.text("rule", schema.RULE),
            params=fields.each("params", _read_param),
            subgroups=fields.each("subgroups", _read_stored),
            optimizer_crc=fields.number("optimizer_crc", most=schema.MAX_CHECKSUM),
            files=fields.each("files", _read_saved) if version > VERSION_WITHOUT_FILES else None,
        )
        for index, stored in enumerate(manifest.subgroups):
            schema.check_subgroup(
                index, stored.file, stored.numel, stored.state_bytes, stored.weight_format, stored.segments
            )
        segments = [segment for stored in manifest.subgroups for segment in stored.segments]
        schema.check_all_elements([param.shape for param in manifest.params], segments)
        return manifest


def _read_param(fields: Fields) -> ParamForm:
    return ParamForm(fields.text("dtype", schema.DTYPE), fields.numbers("shape"), fields.numbers("strides"))


def _read_stored(fields: Fields) -> StoredSubgroup:
    return StoredSubgroup(
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
    """A complete checkpoint, as one rank's part of it.

    directory: directory of the checkpoint, `step-<n>`.
    manifest: list of contents of this rank's part.
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
        """Verifies the files that `save_also` wrote by their checksums; all of them are read completely.
        `load_checkpoint` calls it too. Call it yourself before you load weights from these files.

        FileDamaged, DataTruncated or StrangeEntry when a file is not as it was written, FileUnreadable when the system
        refuses to read it. Files saved by an earlier version of Tidegate have no checksums: a warning is logged once.
        """
        with readable(self.folder):
            require_directory(self.folder)
            if self.manifest.files is None:
                warn_without_checksums(self.folder, self.manifest.own_files)
            else:
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
        """Whether `tidegate doctor` may remove it. False for checkpoints that may be sound: written by a newer version
        of Tidegate or on another kind of machine, or unreadable at present."""
        return not isinstance(self.reason, NewerFormat | UnknownChecksum | ForeignByteOrder | FileUnreadable)

    def __repr__(self) -> str:
        return f"DamagedCheckpoint({self.directory}, {self.reason})"


def find_checkpoints(directory: str | os.PathLike[str], rank: int = 0) -> list[Checkpoint]:
    """Lists all complete checkpoints in `directory`, the newest first, as parts of `rank`. Empty when there is no
    directory.

    Checkpoints with a damaged manifest are left out, with a warning: see `find_damaged_checkpoints`. PathUnusable when
    the directory cannot be read.
    """
    return list_checkpoints(Path(directory), rank)[0]


def find_damaged_checkpoints(directory: str | os.PathLike[str]) -> list[DamagedCheckpoint]:
    """Lists checkpoints in `directory` with an unusable manifest of any rank, in the order of their names. Damage to
    the data is not detected here: `tidegate doctor --checkpoints` reads the data."""
    return list_checkpoints(Path(directory), 0)[1]


def list_checkpoints(directory: Path, rank: int) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """Lists the complete checkpoints, the newest first, and the damaged ones. Each damaged checkpoint is logged once in
    a process."""
    complete, damaged = [], []
    for step in step_entries(directory):
        try:
            manifests = manifests_of(step)
        except FileNotFoundError:  # its run is removing it
            continue
        except StateFileError as reason:
            damaged.append(DamagedCheckpoint(step, reason))
        else:
            if has_all_ranks(manifests):
                complete += [Checkpoint(step, manifest) for manifest in manifests if manifest.rank == rank]
    for checkpoint in damaged:
        warn(checkpoint)
    return sorted(complete, key=lambda checkpoint: -checkpoint.manifest.number), damaged


def manifests_of(step: Path) -> list[Manifest]:
    """Reads the manifests of all ranks in a checkpoint's directory. `StateFileError` when a manifest cannot be used,
    FileNotFoundError when the checkpoint is removed meanwhile."""
    with readable(step):
        return _manifests_of(step)


def _manifests_of(step: Path) -> list[Manifest]:
    require_directory(step)
    manifests = []
    for path in sorted(path for path in step.iterdir() if MANIFEST_NAME.fullmatch(path.name)):
        manifest = read_manifest(path)
        if path != manifest_path(step, manifest.rank):
            raise ManifestDamaged(path, f"that of rank {manifest.rank}", path.stem)
        if step.name.partition(".")[0] != f"step-{manifest.step}":
            raise ManifestDamaged(path, f"that of step {manifest.step}", step.name)
        manifests.append(manifest)
    if has_all_ranks(manifests):
        for manifest in manifests:
            folder = step / manifest.folder
            try:
                require_directory(folder)
            except FileNotFoundError as error:
                if not manifest_path(step, manifest.rank).exists():
                    raise
                raise DataTruncated(folder, "no folder", "one") from error
    return manifests


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Converts OSError to FileUnreadable; FileNotFoundError is passed on unchanged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileUnreadable(error.filename or path, error) from error


_warned: set[tuple[str, str]] = set()
"""Damaged checkpoints, with the reason, for which a warning was logged in this process."""


def warn(damaged: DamagedCheckpoint) -> None:
    """Logs a damaged checkpoint, once in a process."""
    if (about := (str(damaged.directory), str(damaged.reason))) not in _warned:
        _warned.add(about)
        is_damaged = damaged.is_removable
        log.warning(
            "checkpoint %s is %sleft out: %s `tidegate doctor --checkpoints %s` lists %ssuch checkpoints.",
            damaged.directory, "damaged and " if is_damaged else "", damaged.reason, damaged.directory.parent,
            "and removes " if is_damaged else "",
            extra=event("checkpoint_damaged", checkpoint=str(damaged.directory), reason=str(damaged.reason)),
        )  # fmt: skip


def choose(directory: str | os.PathLike[str], rank: int, step: int | None) -> Checkpoint:
    """The newest complete checkpoint, or the newest of `step`. NoCheckpoint when there is none; the damage, as its
    error, when only damaged ones exist."""
    complete, damaged = list_checkpoints(Path(directory), rank)
    for one in complete:
        if step in (None, one.step):
            return one
    if reasons := [one for one in damaged if step in (None, _step_of(one.directory))]:
        raise max(reasons, key=lambda one: _step_of(one.directory)).reason
    wanted = "No complete checkpoint" if step is None else f"No complete checkpoint of step {step}"
    steps = ", ".join(str(one.step) for one in complete)
    broken = f"; damaged: {', '.join(one.directory.name for one in damaged)}" if damaged else ""
    where = f"{wanted} of rank {rank} is in {Path(directory).absolute()}"
    raise NoCheckpoint(f"{where}; steps there: {steps or 'none'}{broken}.")


def _step_of(directory: Path) -> int:
    """Number of updates, from the directory's name."""
    return int(directory.name.removeprefix("step-").partition(".")[0])


def step_entries(directory: Path) -> list[Path]:
    """Entries named like a checkpoint, of any kind. PathUnusable when the directory cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PathUnusable(
            f"{directory} cannot be read: {error.strerror}. Give the directory that checkpoints were saved to."
        ) from error


def step_directories(directory: Path) -> Iterator[Path]:
    """Directories of checkpoints, without symbolic links and unreadable entries."""
    for path in step_entries(directory):
        with suppress(OSError):
            if is_directory(path):
                yield path


def folder_name(rank: int, attempt: str) -> str:
    """Name of the folder with a rank's files."""
    return f"rank{rank}-{attempt}"


def manifest_path(step_directory: Path, rank: int) -> Path:
    """Path of a rank's manifest."""
    return step_directory / f"rank{rank}.json"


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest. FileNotFoundError when there is none, `StateFileError` when it cannot be used."""
    with readable(path), open_plain(path) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestDamaged(path, f"more than {MAX_MANIFEST_BYTES:,} bytes", "fewer")
    return Manifest.unpack(data, path)


def publish(step_directory: Path, manifest: Manifest) -> Path:
    """Writes a rank's manifest with an atomic rename: from then on the rank's part exists. The files that it names must
    already be on stable storage."""
    path = manifest_path(step_directory, manifest.rank)
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(manifest.pack())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    try:
        sync(step_directory)
    except BaseException:  # the rename may not survive a power cut, and the caller removes the files: undo it
        path.unlink(missing_ok=True)
        raise
    return path


def unpublish(checkpoint: Checkpoint) -> None:
    """Removes the rank's manifest: it is no longer a checkpoint. Its files remain."""
    manifest_path(checkpoint.directory, checkpoint.manifest.rank).unlink(missing_ok=True)
    sync(checkpoint.directory)


def remove_orphans(directory: Path, rank: int) -> None:
    """Removes folders of this rank that no manifest names, and directories of checkpoints that are then empty. Other
    files are left alone, and nothing is removed through a symbolic link. A directory that cannot be read or written is
    skipped, so that other checkpoints can still be saved."""
    for step in list(step_directories(directory)):
        with suppress(OSError):
            _remove_orphans_of(step, rank)


def _remove_orphans_of(step: Path, rank: int) -> None:
    named = _folders_named_by(manifest_path(step, rank))
    with suppress(FileNotFoundError, IsADirectoryError):
        manifest_path(step, rank).with_suffix(".new").unlink()
    for folder in step.glob(f"rank{rank}-*"):
        attempt = folder.name.removeprefix(f"rank{rank}-")
        ours = schema.ATTEMPT.fullmatch(attempt) and is_directory(folder)
        if ours and named is not None and folder.name not in named:
            _remove_tree(folder)
    with suppress(OSError):  # not empty: it holds files of other ranks, or of the user
        step.rmdir()


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("files of an interrupted or expired checkpoint in %s cannot be removed: %s", folder, error)


def _folders_named_by(manifest: Path) -> Sequence[str] | None:
    """The folder that a manifest names, as a list; empty without a manifest, None when the manifest is unreadable."""
    try:
        return [read_manifest(manifest).folder]
    except FileNotFoundError:
        return []
    except StateFileError:
        return None


def sync(path: Path) -> None:
    """Writes a file, or the entries of a directory, to stable storage (fsync)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unpublish_superseded(
    directory: Path, complete: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint], rank: int
) -> None:
    """Removes this rank's manifests of checkpoints that other ranks never completed, if they are older than the newest
    of the `complete` ones. `damaged` ones are kept: they may have been complete."""
    newest = max((one.manifest.number for one in complete), default=0)
    usable: Iterable[Checkpoint | DamagedCheckpoint] = (*complete, *damaged)
    kept = {one.directory for one in usable}
    for step in list(step_directories(directory)):
        with suppress(OSError, StateFileError):
            if step not in kept and (manifest := read_manifest(manifest_path(step, rank))).number <= newest:
                unpublish(Checkpoint(step, manifest))


def has_all_ranks(manifests: Sequence[Manifest]) -> bool:
    """Whether the manifests are those of all ranks, from one attempt."""
    if not manifests or len({(manifest.attempt, manifest.ranks) for manifest in manifests}) > 1:
        return False
    return len({manifest.rank for manifest in manifests}) == len(manifests) == manifests[0].ranks
