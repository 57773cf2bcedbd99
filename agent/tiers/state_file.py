"""Binary format of a state file: the optimizer state of one subgroup behind a checksummed header.

The header fills whole pages of 4096 bytes. The data follow, padded with zeros to a whole page.

All offsets are multiples of 4096 bytes, so that header and data can be read and written with direct I/O. Numbers in the
header are little-endian. The data have the byte order of the machine that wrote them, which the header names.

    byte   size
    0      8     "TIDEGATE"
    8      4     version of the format, 2
    12     4     0x01020304 in the byte order of the data
    16     16    id of the run
    32     16    name of the update rule, ASCII, filled up with zeros
    48     4     rank
    52     4     weight format: its position in `kernels.WeightFormat`
    56     8     subgroup
    64     8     numel: parameters in the subgroup
    72     4     bytes of state per parameter
    76     4     kind of the checksums of blocks and weights
    80     8     step: number of the last update, 0 before the first
    88     8     bytes of a block, a multiple of 4096; the last block may be shorter
    96     8     bytes of data: numel × bytes per parameter
    104    8     number of blocks
    112    8     checksum of the weights that the state belongs to
    120    256   names and dtypes of the rule's state tensors (`UpdateRule.tensors_text`), ASCII, filled up with zeros
    376    4·n   checksum of each block; that of the last block includes the zero padding
    …            zeros
    end-4  4     CRC-32 (zlib's) of all header bytes before it

In version 1, which is read but not written, the checksums of blocks begin at byte 120, and the tensors are those of
AdamW.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final

from tidegate.errors import (
    BlockDamaged,
    DataTruncated,
    ForeignByteOrder,
    ForeignRun,
    ForeignState,
    HeaderContradiction,
    HeaderDamaged,
    HeaderTruncated,
    NewerFormat,
    NotAStateFile,
    StateFileError,
    UnknownChecksum,
    WeightsMismatch,
    WrongStep,
)
from tidegate.rules.adamw import RULE as AdamW
from tidegate.rules.rule import MAX_NAME, MAX_TENSORS_TEXT

PAGE_BYTES: Final = 4096
MAGIC: Final = b"TIDEGATE"
VERSION: Final = 2
VERSION_WITHOUT_TENSORS: Final = 1
"""Version of the format whose header does not name the state tensors: it was written for AdamW's state only."""
VERSIONS: Final = (VERSION_WITHOUT_TENSORS, VERSION)
BYTE_ORDER_MARKS: Final = {"little": 0x01020304, "big": 0x04030201}
"""Value of the byte order mark, read as little-endian, for each byte order of the data."""

_START: Final = struct.Struct("<8sII")
_FIELDS: Final = struct.Struct("<16s16sIIQQIIQQQQQ")
_CHECKSUM: Final = struct.Struct("<I")
_TENSORS_AT: Final = _START.size + _FIELDS.size

FileName = str | os.PathLike[str]


class ChecksumKind(IntEnum):
    """Algorithm of the checksums of blocks and weights. The code that transfers the data computes the checksums."""

    CRC32C = 1


@dataclass(frozen=True, slots=True)
class StateKind:
    """Identity of the state in a state file: update rule, rank, subgroup, number of parameters, weight format, bytes of
    state per parameter, and state tensors. State may be loaded from a file only if all these values are the expected
    ones."""

    rule: str
    """Name of the update rule: 1 to 16 ASCII characters."""
    rank: int
    subgroup: int
    numel: int
    weight_format: int
    state_bytes: int
    """Bytes of state per parameter."""
    tensors: str = AdamW.tensors_text
    """Names and dtypes of the rule's state tensors (`UpdateRule.tensors_text`)."""

    def __post_init__(self) -> None:
        if not (self.rule.isascii() and self.rule.isprintable() and 1 <= len(self.rule) <= MAX_NAME):
            raise ValueError(f"rule is {self.rule!r}, it must be 1 to {MAX_NAME} printable ASCII characters")
        if not (self.tensors.isascii() and len(self.tensors) <= MAX_TENSORS_TEXT):
            raise ValueError(f"tensors is {self.tensors!r}, it must be at most {MAX_TENSORS_TEXT} ASCII characters")
        for name, least in (("rank", 0), ("subgroup", 0), ("numel", 1), ("weight_format", 0), ("state_bytes", 0)):
            _at_least(name, getattr(self, name), least)

    @property
    def data_bytes(self) -> int:
        """Bytes of state, without padding."""
        return self.numel * self.state_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a state file. `data_bytes` and the offsets are computed from the fields.

    ValueError when a field has a value that no file can hold.
    """

    kind: StateKind
    run_id: bytes
    """Id of the run that wrote the file, 16 bytes."""
    step: int
    block_bytes: int
    block_checksums: tuple[int, ...]
    """Checksum of each block, 32 bits."""
    weights_checksum: int
    """Checksum of the weights that the state belongs to, at most 64 bits."""
    checksum_kind: ChecksumKind = ChecksumKind.CRC32C
    version: int = VERSION

    def __post_init__(self) -> None:
        if len(self.run_id) != 16:
            raise ValueError(f"run_id has {len(self.run_id)} bytes, it must have 16")
        if self.block_bytes < PAGE_BYTES or self.block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes is {self.block_bytes}, it must be a multiple of {PAGE_BYTES}")
        expected = num_blocks(self.kind.data_bytes, self.block_bytes)
        if len(self.block_checksums) != expected:
            raise ValueError(
                f"block_checksums has {len(self.block_checksums)} checksums, but {self.kind.data_bytes:,} bytes of "
                f"data in blocks of {self.block_bytes:,} bytes need {expected}"
            )
        _at_least("step", self.step, 0)
        _at_least("weights_checksum", self.weights_checksum, 0)

    @property
    def data_bytes(self) -> int:
        """Bytes of state, without padding."""
        return self.kind.data_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of the header, which is also the offset of the data."""
        return header_bytes(len(self.block_checksums), self.version)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file: header, data and padding."""
        return self.header_bytes + padded_bytes(self.data_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """Offset in the file and length in bytes of one block. The last block includes the padding."""
        start = index * self.block_bytes
        if not 0 <= start < self.data_bytes:
            raise IndexError(
                f"block {index} does not exist: the file has {len(self.block_checksums)} blocks, numbered from 0"
            )
        return self.header_bytes + start, min(self.block_bytes, padded_bytes(self.data_bytes) - start)

    def pack(self) -> bytes:
        """The header as bytes, `header_bytes` long. ValueError when a number does not fit."""
        kind, room = self.kind, _tensors_bytes(self.version)
        try:
            packed = (
                _START.pack(MAGIC, self.version, BYTE_ORDER_MARKS[sys.byteorder])
                + _FIELDS.pack(
                    self.run_id, kind.rule.encode("ascii"), kind.rank, kind.weight_format, kind.subgroup, kind.numel,
                    kind.state_bytes, self.checksum_kind, self.step, self.block_bytes, self.data_bytes,
                    len(self.block_checksums), self.weights_checksum,
                )
                + kind.tensors.encode("ascii").ljust(room, b"\0")[:room]
                + struct.pack(f"<{len(self.block_checksums)}I", *self.block_checksums)
            )  # fmt: skip
        except struct.error as error:
            raise ValueError(f"{self} has a number that does not fit in the header: {error}") from error
        body = packed.ljust(self.header_bytes - _CHECKSUM.size, b"\0")
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, file: FileName) -> Header:
        """Parses the header at the beginning of `data`; bytes after the header are ignored. `file` is named in errors.

        Raises a `StateFileError` for each kind of fault: NotAStateFile, NewerFormat, HeaderTruncated, HeaderDamaged,
        HeaderContradiction, ForeignByteOrder, UnknownChecksum.
        """
        view = memoryview(data).cast("B")
        mark = _check_start(view, file)
        _check_version(view, file)
        nbytes = _check_whole(view, file)
        order = next((order for order, known in BYTE_ORDER_MARKS.items() if known == mark), f"mark {mark:#010x}")
        if order != sys.byteorder:
            raise ForeignByteOrder(file, order, sys.byteorder)
        return _read(view[:nbytes], file)

    def check_file(self, nbytes: int, file: FileName) -> None:
        """Raises DataTruncated when a file of `nbytes` is too short for the data. The file may be longer, because space
        may be reserved."""
        if nbytes < self.file_bytes:
            raise DataTruncated(file, f"{nbytes:,} bytes", f"{self.file_bytes:,}")

    def check_run(self, run_id: bytes, file: FileName) -> None:
        """Raises ForeignRun when another run wrote the file. Not called for files that a run resumes from."""
        if self.run_id != run_id:
            raise ForeignRun(file, f"run {self.run_id.hex()}", run_id.hex())

    def check_kind(self, kind: StateKind, file: FileName) -> None:
        """Raises ForeignState when the file holds the state of another rank, subgroup, format or update rule."""
        if self.kind != kind:
            names = [field.name for field in fields(StateKind)]
            rows = zip(names, astuple(self.kind), astuple(kind), strict=True)
            differing = [(name, mine, theirs) for name, mine, theirs in rows if mine != theirs]
            found = ", ".join(f"{name} {mine}" for name, mine, _ in differing)
            raise ForeignState(file, found, ", ".join(f"{name} {theirs}" for name, _, theirs in differing))

    def check_step(self, step: int, file: FileName) -> None:
        """Raises WrongStep when the state in the file is not the one after update number `step`."""
        if self.step != step:
            raise WrongStep(file, f"step {self.step}", step)

    def check_block(self, index: int, checksum: int, file: FileName) -> None:
        """Raises BlockDamaged when `checksum`, computed from the data read for this block, differs from the
        header's."""
        if self.block_checksums[index] != checksum:
            raise BlockDamaged(file, index, self.block(index)[0], checksum, self.block_checksums[index])

    def check_weights(self, checksum: int, file: FileName) -> None:
        """Raises WeightsMismatch when the model's weights have another checksum than the weights that the state was
        written for."""
        if self.weights_checksum != checksum:
            raise WeightsMismatch(
                file, f"state of weights {self.weights_checksum:#018x}", f"{checksum:#018x}, which the model has"
            )


def num_blocks(data_bytes: int, block_bytes: int) -> int:
    """Number of blocks that the data fill; the last block may be shorter."""
    return -(-data_bytes // block_bytes)


def header_bytes(num_blocks: int, version: int = VERSION) -> int:
    """Bytes of the header of a file with `num_blocks` blocks, rounded up to whole pages."""
    return padded_bytes(_TENSORS_AT + _tensors_bytes(version) + _CHECKSUM.size * num_blocks + _CHECKSUM.size)


def _tensors_bytes(version: int) -> int:
    """Bytes of the text that names the state tensors."""
    return 0 if version == VERSION_WITHOUT_TENSORS else MAX_TENSORS_TEXT


def file_bytes(data_bytes: int, block_bytes: int) -> int:
    """Bytes of a state file with `data_bytes` of data: the space to reserve."""
    return header_bytes(num_blocks(data_bytes, block_bytes)) + padded_bytes(data_bytes)


def padded_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def bytes_to_read(first_page: bytes | bytearray | memoryview, file: FileName) -> int:
    """Bytes of the whole header, computed from its first page, for a reader that does not know the number of blocks.
    Raises the same errors as `Header.unpack`.

    The checksum is not verified yet: if the number of blocks is damaged, the result may be wrong, but it is at least a
    page.
    """
    view = memoryview(first_page).cast("B")
    _check_start(view, file)
    try:
        return header_bytes(_count_blocks(view, file), _version_of(view))
    except HeaderContradiction:
        _check_version(view, file)
        raise


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, it must be at least {least}")


def _check_start(view: memoryview, file: FileName) -> int:
    """Checks the first fields of the header, by which a state file is recognised, and returns its byte order mark."""
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)] or not view:
        raise NotAStateFile(file, bytes(view[: len(MAGIC)]), MAGIC)
    if len(view) < _TENSORS_AT:
        raise HeaderTruncated(file, f"{len(view):,} bytes", f"at least {PAGE_BYTES:,}")
    _, _, mark = _START.unpack_from(view)
    return int(mark)


def _check_version(view: memoryview, file: FileName) -> None:
    """Raises NewerFormat when a later version of Tidegate wrote the header. If the header's checksum is right with a
    known version number in place of the stored one, only this number is damaged: then this function returns, and
    `_check_whole` raises."""
    _, version, mark = _START.unpack_from(view)
    if version > VERSION and not any(_is_whole_with(known, view, mark) for known in VERSIONS):
        raise NewerFormat(file, f"version {version}", f"at most {VERSION}")


def _version_of(view: memoryview) -> int:
    return int(_START.unpack_from(view)[1])


def _is_whole_with(version: int, view: memoryview, mark: int) -> bool:
    """Whether the header is complete, and its checksum is right when `version` is put in place of the stored
    version."""
    changed = bytearray(view)
    _START.pack_into(changed, 0, MAGIC, version, mark)
    try:
        _check_whole(memoryview(changed), "")
    except StateFileError:
        return False
    return True


def _count_blocks(view: memoryview, file: FileName) -> int:
    """Number of blocks, checked against the bytes of data. The position of the header's checksum depends on this
    number."""
    *_, block_bytes, data_bytes, count, _ = _FIELDS.unpack_from(view, _START.size)
    if not block_bytes or count != num_blocks(data_bytes, block_bytes):
        found = f"{count:,} blocks of {block_bytes:,} bytes for {data_bytes:,} bytes"
        raise HeaderContradiction(file, found, "the number of blocks that these bytes need")
    return int(count)


def _check_whole(view: memoryview, file: FileName) -> int:
    """Checks that the header is complete and matches its checksum, and returns its size in bytes. HeaderTruncated or
    HeaderDamaged otherwise."""
    nbytes = header_bytes(_count_blocks(view, file), _version_of(view))
    if len(view) < nbytes:
        raise HeaderTruncated(file, f"{len(view):,} bytes", f"{nbytes:,}")
    end = nbytes - _CHECKSUM.size
    (expected,) = _CHECKSUM.unpack_from(view, end)
    found = zlib.crc32(view[:end])
    if found != expected:
        raise HeaderDamaged(file, f"checksum {found:#010x}", f"{expected:#010x}")
    return nbytes


def _read(view: memoryview, file: FileName) -> Header:
    """Converts a complete header with a correct checksum to a `Header`. Raises HeaderContradiction or UnknownChecksum
    if a value is invalid. As the checksum is correct, such a value was already invalid when the header was written."""
    (
        run_id, rule, rank, weight_format, subgroup, numel, state_bytes, checksum_kind, step, block_bytes, data_bytes,
        count, weights_checksum,
    ) = _FIELDS.unpack_from(view, _START.size)  # fmt: skip
    if checksum_kind not in tuple(ChecksumKind):
        raise UnknownChecksum(file, checksum_kind, ", ".join(f"{kind.value} ({kind.name})" for kind in ChecksumKind))
    if data_bytes != numel * state_bytes:
        found = f"{data_bytes:,} bytes for {numel:,} parameters of {state_bytes}"
        raise HeaderContradiction(file, found, f"{numel * state_bytes:,} bytes")
    version = _version_of(view)
    if version not in VERSIONS:
        raise HeaderContradiction(file, f"format version {version}, which does not exist", f"format version {VERSION}")
    blocks_at = _TENSORS_AT + _tensors_bytes(version)
    checksums = struct.unpack_from(f"<{count}I", view, blocks_at)
    tensors = _text(view[_TENSORS_AT:blocks_at]) if version != VERSION_WITHOUT_TENSORS else AdamW.tensors_text
    try:
        kind = StateKind(_text(rule), rank, subgroup, numel, weight_format, state_bytes, tensors)
        header = Header(
            kind, run_id, step, block_bytes, checksums, weights_checksum, ChecksumKind(checksum_kind), version
        )
    except ValueError as error:
        raise HeaderContradiction(file, f"an invalid value ({error})", "only values that Tidegate writes") from error
    if header.pack() != view:
        raise HeaderContradiction(file, "bytes other than 0 after the values", "bytes that are 0")
    return header


def _text(field: bytes | memoryview) -> str:
    """The text of a field that is filled up with zeros. In Latin-1 each byte is a character: StateKind refuses those
    that are not ASCII."""
    return bytes(field).rstrip(b"\0").decode("latin-1")
