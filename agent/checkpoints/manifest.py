"""Manifest of one rank's part of a checkpoint: its format, and reading it.

    <directory>/step-<n>/rank<k>.json          manifest of one rank: written last, renamed to this name
    <directory>/step-<n>/rank<k>-<attempt>/    files that it names: state of subgroups, optimizer.pt, user files

The manifest lists these files and the parameters whose state they hold. `<attempt>`: random id, the same on all ranks,
of one attempt to save the checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import torch

from tidegate.agent.checkpoints import manifest_schema as schema
from tidegate.agent.checkpoints.manifest_schema import Fields, WrongManifestError, canonical
from tidegate.agent.checkpoints.saved_files import SavedFile
from tidegate.agent.parameters.subgroups import Segment
from tidegate.agent.tiers.plain_files import open_plain
from tidegate.agent.tiers.state_file import StateKind
from tidegate.errors import FileUnreadable, ManifestDamaged, NewerFormat
from tidegate.kernels import WeightFormat
from tidegate.rules.adamw import RULE as AdamW
from tidegate.rules.rule import StateTensor, tensors_text

VERSION: Final = 3
"""Version of the manifest format. Later versions must keep the outer fields `checkpoint` and `crc32` (the checksum of
the canonical text of `checkpoint`), or have no field `crc32`. So if a manifest has a higher version number and a wrong
`crc32`, it is treated as damaged, not as written by a later version of Tidegate."""
VERSION_WITHOUT_FILES: Final = 1
"""Version of the format without the list of the user's files (`save_also`)."""
VERSION_WITHOUT_TENSORS: Final = 2
"""Last version of the format that does not list the state tensors: it was written for AdamW's state only."""
MAX_MANIFEST_BYTES: Final = 1 << 30
"""Largest manifest that is read. The manifest of a million subgroups has a quarter of this size."""
OPTIMIZER_FILE: Final = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ParamForm:
    """Type and memory layout of a parameter. The saved state of one parameter fits another only if these are equal."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides of the dimensions longer than 1. They are compared because state is stored in the memory order of the
    weight."""

    @classmethod
    def of(cls, param: torch.Tensor) -> Self:
        """The form of a tensor."""
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return cls(str(param.dtype).removeprefix("torch."), tuple(param.shape), strides)


@dataclass(frozen=True, slots=True)
class StoredSubgroup:
    """Entry of a manifest for one subgroup: its state file, and the segments of parameters in it. `step`: number of the
    update that the state belongs to."""

    file: str
    step: int
    numel: int
    weight_format: int
    state_bytes: int
    """Bytes of state per parameter."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one rank's part of a checkpoint. `step`: number of updates that the optimizer had done."""

    step: int
    number: int
    """Sequence number of the checkpoint in its directory, from 1; later checkpoints have higher numbers."""
    attempt: str
    run_id: str
    rank: int
    ranks: int
    rule: str
    tensors: tuple[StateTensor, ...]
    """State tensors of the update rule."""
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
        """Names of the files that Tidegate wrote to the rank's folder. All other files in this folder are the
        user's."""
        return frozenset((OPTIMIZER_FILE, *(stored.file for stored in self.subgroups)))

    def kind(self, index: int) -> StateKind:
        """Identity of the state in the file of one subgroup."""
        one = self.subgroups[index]
        tensors = tensors_text(self.tensors)
        return StateKind(self.rule, self.rank, index, one.numel, one.weight_format, one.state_bytes, tensors)

    def pack(self) -> bytes:
        """The manifest as JSON with its checksum."""
        body = canonical({"version": VERSION, **asdict(self)})
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> Self:
        """Parses and validates a manifest. ManifestDamaged when its content is damaged, NewerFormat when a later
        version of Tidegate wrote it."""
        try:
            return cls._unpack(data, file)
        except WrongManifestError as error:
            raise ManifestDamaged(file, error.found, error.expected) from error

    @classmethod
    def _unpack(cls, data: bytes, file: Path) -> Self:
        """Parses and validates a manifest. WrongManifestError when its content is damaged, NewerFormat when a later
        version of Tidegate wrote it."""
        outer = schema.parse(data)
        if not isinstance(outer, dict) or not isinstance(values := outer.get("checkpoint"), dict):
            raise WrongManifestError(f"JSON of {len(data):,} bytes that is not a manifest", "a manifest")
        version, expected = values.get("version"), outer.get("crc32")
        found = zlib.crc32(canonical(values).encode())
        is_right = type(expected) is int and found == expected
        if type(version) is int and version > VERSION and (is_right or "crc32" not in outer):
            raise NewerFormat(file, f"version {version:#x}", f"at most {VERSION:#x}")
        if not is_right:
            raise WrongManifestError(f"checksum {found:#010x}", schema.short_text(expected))
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
            tensors=fields.each("tensors", _read_tensor) if version > VERSION_WITHOUT_TENSORS else AdamW.tensors,
            params=fields.each("params", _read_param),
            subgroups=fields.each("subgroups", _read_stored),
            optimizer_crc=fields.number("optimizer_crc", most=schema.MAX_CHECKSUM),
            files=fields.each("files", _read_saved) if version > VERSION_WITHOUT_FILES else None,
        )
        tensor_bytes = sum(tensor.nbytes for tensor in manifest.tensors)
        for index, stored in enumerate(manifest.subgroups):
            schema.check_subgroup(
                index,
                stored.file,
                stored.numel,
                stored.state_bytes,
                stored.weight_format,
                stored.segments,
                tensor_bytes,
            )
        segments = [segment for stored in manifest.subgroups for segment in stored.segments]
        schema.check_all_elements([param.shape for param in manifest.params], segments)
        return manifest


def _read_param(fields: Fields) -> ParamForm:
    return ParamForm(fields.text("dtype", schema.DTYPE), fields.numbers("shape"), fields.numbers("strides"))


def _read_tensor(fields: Fields) -> StateTensor:
    return StateTensor(fields.text("name", schema.TENSOR), fields.text("dtype", schema.TENSOR_DTYPE))


def _read_stored(fields: Fields) -> StoredSubgroup:
    return StoredSubgroup(
        file=fields.path("file"),
        step=fields.number("step"),
        numel=fields.number("numel", 1),
        weight_format=fields.number("weight_format", most=len(WeightFormat) - 1),
        state_bytes=fields.number("state_bytes"),
        segments=fields.each("segments", schema.read_segment),
    )


def _read_saved(fields: Fields) -> SavedFile:
    return SavedFile(fields.path("file"), fields.number("nbytes"), fields.text("sha256", schema.SHA256))


def folder_name(rank: int, attempt: str) -> str:
    """Name of the folder with a rank's files. `attempt`: random id of one attempt to save the checkpoint."""
    return f"rank{rank}-{attempt}"


def manifest_path(step_directory: Path, rank: int) -> Path:
    """Path of a rank's manifest."""
    return step_directory / f"rank{rank}.json"


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest. FileNotFoundError when there is none, `StateFileError` when it cannot be used."""
    with file_unreadable_on_error(path), open_plain(path) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestDamaged(path, f"more than {MAX_MANIFEST_BYTES:,} bytes", "a smaller file")
    return Manifest.unpack(data, path)


@contextmanager
def file_unreadable_on_error(path: Path) -> Iterator[None]:
    """Context manager that converts OSError to FileUnreadable. FileNotFoundError is passed on unchanged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileUnreadable(error.filename or path, error) from error
