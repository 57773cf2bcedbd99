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
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tidegate.agent.checkpoints import manifest_schema as schema
from tidegate.agent.checkpoints.manifest_schema import Count, Number, PathBelow, WrongManifestError, canonical
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
VERSION_WITHOUT_TENSORS: Final = 2
"""Version of the format that does not list the state tensors: it was written for AdamW's state only."""
MAX_MANIFEST_BYTES: Final = 1 << 30
"""Largest manifest that is read. The manifest of a million subgroups has a quarter of this size."""
OPTIMIZER_FILE: Final = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ParamForm:
    """Type and memory layout of a parameter. The saved state of one parameter fits another only if these are equal."""

    dtype: Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,31}$")]
    shape: tuple[Number, ...]
    strides: tuple[Number, ...]
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

    file: PathBelow
    step: Number
    numel: Count
    weight_format: Annotated[int, Field(ge=0, lt=len(WeightFormat))]
    state_bytes: Number
    """Bytes of state per parameter."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one rank's part of a checkpoint. `step`: number of updates that the optimizer had done."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Number
    number: Count
    """Sequence number of the checkpoint in its directory, from 1; later checkpoints have higher numbers."""
    attempt: Annotated[str, Field(pattern=f"^{schema.ATTEMPT}$")]
    run_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    rank: Number
    ranks: Count
    rule: Annotated[str, Field(pattern="^[ -~]{1,16}$")]
    params: tuple[ParamForm, ...]
    subgroups: tuple[StoredSubgroup, ...]
    optimizer_crc: Annotated[int, Field(ge=0, lt=2**32)]
    files: tuple[SavedFile, ...]
    """Files that `save_also` wrote."""
    tensors: tuple[StateTensor, ...] = AdamW.tensors
    """State tensors of the update rule. Manifests of version 2 do not list them."""
    version: Literal[2, 3] = VERSION

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
        body = canonical(asdict(self))
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": json.loads(body)}, indent=1).encode()

    @classmethod
    def unpack(cls, data: bytes, file: Path) -> Manifest:
        """Parses and validates a manifest. ManifestDamaged when its content is damaged, NewerFormat when another
        version of Tidegate wrote it, whose format this one does not read."""
        try:
            return cls._unpack(data, file)
        except WrongManifestError as error:
            raise ManifestDamaged(file, error.found, error.expected) from error

    @classmethod
    def _unpack(cls, data: bytes, file: Path) -> Manifest:
        """Parses and validates a manifest. WrongManifestError when its content is damaged, NewerFormat when a later
        version of Tidegate wrote it."""
        outer = schema.parse(data)
        if not isinstance(outer, dict) or not isinstance(values := outer.get("checkpoint"), dict):
            raise WrongManifestError(f"JSON of {len(data):,} bytes that is not a manifest", "a manifest")
        version, expected, body = values.get("version"), outer.get("crc32"), canonical(values)
        found = zlib.crc32(body.encode())
        is_right = type(expected) is int and found == expected
        # Version 1 is not read any more, but such a manifest is not damaged.
        if type(version) is int and (version > VERSION or version == 1) and (is_right or "crc32" not in outer):
            raise NewerFormat(file, f"version {version:#x}", f"{VERSION_WITHOUT_TENSORS:#x} or {VERSION:#x}")
        if not is_right:
            raise WrongManifestError(f"checksum {found:#010x}", schema.short_text(expected))
        try:
            manifest = _schema().validate_json(body)
        except ValidationError as error:
            raise schema.fault_of(error) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Checks that the values agree with each other. Raises WrongManifestError."""
        if self.rank >= self.ranks:
            raise WrongManifestError(f"rank {self.rank}", f"a rank below {self.ranks}")
        tensor_bytes = sum(tensor.nbytes for tensor in self.tensors)
        for index, stored in enumerate(self.subgroups):
            schema.check_subgroup(
                index,
                stored.file,
                stored.numel,
                stored.state_bytes,
                stored.weight_format,
                stored.segments,
                tensor_bytes,
            )
        segments = [segment for stored in self.subgroups for segment in stored.segments]
        schema.check_all_elements([param.shape for param in self.params], segments)


@cache
def _schema() -> TypeAdapter[Manifest]:
    """The types and bounds of a manifest's values."""
    return TypeAdapter(Manifest)


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
