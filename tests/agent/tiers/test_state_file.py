"""The state file: its bytes, and every way in which one can be broken."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.agent.tiers.state_file import (
    PAGE_BYTES,
    Header,
    StateKind,
    bytes_to_read,
    file_bytes,
    header_bytes,
    num_blocks,
)
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

KIND = StateKind(rule="adamw", rank=3, subgroup=7, numel=1000, weight_format=1, state_bytes=10)
HEADER = Header(
    kind=KIND,
    run_id=bytes(range(16)),
    step=41,
    block_bytes=4096,
    block_checksums=(0xAABBCCDD, 0x01020304, 0xFFFFFFFF),
    weights_checksum=0x1122334455667788,
)
FIELDS = (
    "000102030405060708090a0b0c0d0e0f"  # run
    "6164616d770000000000000000000000"  # rule
    "03000000" "01000000"  # rank, weight format
    "0700000000000000" "e803000000000000"  # subgroup, numel
    "0a000000" "01000000"  # state bytes, kind of checksum
    "2900000000000000" "0010000000000000"  # step, block bytes
    "1027000000000000" "0300000000000000"  # data bytes, blocks
    "8877665544332211"  # weights
)  # fmt: skip
BLOCKS = "ddccbbaa04030201ffffffff"
GOLDEN = (
    "5449444547415445" "02000000" "04030201"  # magic, version, byte order
    + FIELDS + b"exp_avg:float32 exp_avg_sq:float32".ljust(256, b"\0").hex() + BLOCKS
)  # fmt: skip
GOLDEN_1 = "54494445474154450100000004030201" + FIELDS + BLOCKS
"""The header of the format's first version, which names no tensors."""


def with_checksum(body: bytes) -> bytes:
    """The header with a checksum that fits: as if it had been written so."""
    return body[:-4] + struct.pack("<I", zlib.crc32(body[:-4]))


def patched(offset: int, new: bytes) -> bytes:
    packed = HEADER.pack()
    return with_checksum(packed[:offset] + new + packed[offset + len(new) :])


def test_the_bytes_are_these() -> None:
    golden = bytes.fromhex(GOLDEN)
    packed = HEADER.pack()
    assert packed[: len(golden)] == golden
    assert set(packed[len(golden) : -4]) == {0}
    assert packed[-4:].hex() == "5e58b4dc"
    assert len(packed) == PAGE_BYTES
    assert Header.unpack(packed, "f") == HEADER


def test_the_first_version_is_read() -> None:
    packed = bytes.fromhex(GOLDEN_1).ljust(PAGE_BYTES - 4, b"\0") + bytes.fromhex("fcbd4e66")
    assert Header.unpack(packed, "f") == replace(HEADER, version=1)
    assert bytes_to_read(packed, "f") == PAGE_BYTES
    with pytest.raises(HeaderDamaged):
        Header.unpack(packed[:8] + b"\3" + packed[9:], "f")


@pytest.mark.parametrize("count", [962, 963, 993, 994])
def test_headers_of_both_versions_have_the_size_that_their_blocks_need(count: int) -> None:
    kind = replace(KIND, numel=count * 4096, state_bytes=1)
    for version, start in ((1, 120), (2, 376)):
        header = replace(HEADER, kind=kind, block_checksums=tuple(range(count)), version=version)
        packed = header.pack()
        assert len(packed) == header.header_bytes == -(-(start + 4 * count + 4) // 4096) * 4096
        assert bytes_to_read(packed[:PAGE_BYTES], "f") == len(packed)
        assert Header.unpack(packed, "f") == header
        assert header.block(0)[0] == len(packed)


sizes = st.builds(
    lambda numel, state_bytes, pages: (numel, state_bytes, pages * PAGE_BYTES),
    st.integers(1, 2_000_000), st.integers(1, 16), st.integers(1, 8),
)  # fmt: skip


@given(sizes, st.randoms(use_true_random=False))
def test_what_is_packed_is_unpacked(size: tuple[int, int, int], random: Any) -> None:
    numel, state_bytes, block_bytes = size
    count = num_blocks(numel * state_bytes, block_bytes)
    header = Header(
        StateKind(
            "lion", random.getrandbits(32), random.getrandbits(64), numel, random.getrandbits(32), state_bytes,
            random.choice(["", "momentum:bfloat16"]),
        ),
        random.randbytes(16), random.getrandbits(64), block_bytes,
        tuple(random.getrandbits(32) for _ in range(count)), random.getrandbits(64),
    )  # fmt: skip
    packed = header.pack()
    assert len(packed) == header.header_bytes == header_bytes(count) == bytes_to_read(packed[:PAGE_BYTES], "f")
    assert len(packed) % PAGE_BYTES == 0
    assert Header.unpack(packed + b"data", "f") == header
    # Blocks lie one behind the other, from the header to the end of the file; the last one has the padding.
    where = header.header_bytes
    for index in range(count):
        offset, nbytes = header.block(index)
        assert offset == where
        assert offset % PAGE_BYTES == 0
        assert 0 < nbytes <= block_bytes
        where += nbytes
    assert where == header.file_bytes == file_bytes(numel * state_bytes, block_bytes)
    assert 0 <= where - (header.header_bytes + numel * state_bytes) < PAGE_BYTES
    with pytest.raises(IndexError):
        header.block(count)


LONG = replace(
    HEADER,
    kind=replace(KIND, numel=1_000_000),
    block_checksums=tuple(i * 2654435761 & 0xFFFFFFFF for i in range(num_blocks(10_000_000, 4096))),
)


@pytest.mark.parametrize("header", [HEADER, LONG], ids=["one page", "three pages"])
def test_any_flipped_bit_is_refused(header: Header) -> None:
    packed = bytearray(header.pack())
    told: set[type[StateFileError]] = set()
    step = 1 if header is HEADER else 61
    for bit in range(0, len(packed) * 8, step):
        packed[bit // 8] ^= 1 << bit % 8
        for more in (b"", b"\0" * 8192):  # a longer header than there is, and one that seems to be there
            with pytest.raises(StateFileError) as caught:
                Header.unpack(bytes(packed) + more, "f")
            told.add(caught.type)
        packed[bit // 8] ^= 1 << bit % 8
    assert told <= {NotAStateFile, HeaderDamaged, HeaderContradiction}
    assert HeaderDamaged in told


@given(st.integers(0, len(LONG.pack()) - 1))
@example(0)
@example(119)
@example(120)
@example(376)
def test_any_truncated_header_is_refused(nbytes: int) -> None:
    with pytest.raises((HeaderTruncated, NotAStateFile)) as caught:
        Header.unpack(LONG.pack()[:nbytes], "state.tide")
    assert caught.type is (HeaderTruncated if nbytes else NotAStateFile)


@given(st.binary(max_size=PAGE_BYTES), st.booleans(), st.booleans())
def test_noise_is_refused(noise: bytes, begins_well: bool, checksum_fits: bool) -> None:
    data = (HEADER.pack()[:16] + noise if begins_well else noise).ljust(PAGE_BYTES, b"\0")
    with pytest.raises(StateFileError):
        Header.unpack(with_checksum(data) if checksum_fits else data, "f")


@given(st.integers(16, 375), st.binary(min_size=1, max_size=8))
def test_values_that_were_written_wrong_are_refused_or_read_as_they_stand(offset: int, new: bytes) -> None:
    data = patched(offset, new[: 376 - offset])
    try:
        header = Header.unpack(data, "f")
    except StateFileError:
        return
    assert header.pack() == data


BROKEN: dict[str, tuple[bytes, type[StateFileError], str, str]] = {
    "not ours": (b"\x80safetensors" + HEADER.pack(), NotAStateFile, r"b'\x80safeten'", "b'TIDEGATE'"),
    "empty": (b"", NotAStateFile, "b''", "b'TIDEGATE'"),
    "newer": (patched(8, b"\3"), NewerFormat, "version 3", "at most 2"),
    "other byte order": (patched(12, b"\1\2\3\4"), ForeignByteOrder, "big", "little"),
    "no byte order": (patched(12, b"\0\0\0\0"), ForeignByteOrder, "mark 0x00000000", "little"),
    "truncated": (HEADER.pack()[:4095], HeaderTruncated, "4,095 bytes", "4,096"),
    "damaged": (HEADER.pack()[:-1] + b"\0", HeaderDamaged, "checksum 0x", "0x00"),
    "unknown checksum": (patched(76, b"\7"), UnknownChecksum, "7", "1 (CRC32C)"),
    "fewer blocks than data": (
        patched(104, b"\2"),
        HeaderContradiction,
        "2 blocks of 4,096",
        "blocks that these bytes need",
    ),
    "blocks of nothing": (
        patched(88, bytes(8)),
        HeaderContradiction,
        "blocks of 0 bytes",
        "blocks that these bytes need",
    ),
    "blocks of odd size": (patched(88, b"\1"), HeaderContradiction, "block_bytes is 4097", "only values that"),
    "other parameters than data": (patched(64, b"\1"), HeaderContradiction, "10,000 bytes for 769", "7,690 bytes"),
    "a rule without name": (patched(32, bytes(16)), HeaderContradiction, "value (rule is ''", "only values that"),
    "a rule that is not text": (patched(32, b"\xff"), HeaderContradiction, "printable ASCII", "only values that"),
    "tensors that are not text": (patched(376 - 256, b"\xff"), HeaderContradiction, "tensors is", "only values that"),
    "something in the padding": (patched(400, b"\1"), HeaderContradiction, "bytes other than 0", "bytes that are 0"),
    "version 0": (patched(8, b"\0"), HeaderContradiction, "version 0", "version 2."),
}


@pytest.mark.parametrize(("data", "error", "found", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_each_broken_header_has_its_error(data: bytes, error: type[StateFileError], found: str, expected: str) -> None:
    with pytest.raises(StateFileError) as caught:
        Header.unpack(data, "/nvme/subgroup-7")
    assert caught.type is error
    text = str(caught.value)
    assert text.startswith("/nvme/subgroup-7 ")
    before, _, after = text.partition(", expected ")
    assert found in before
    assert after.startswith(expected) or expected in after
    assert text.endswith(error.remedy)


MISMATCHED: dict[str, tuple[Callable[[], None], type[StateFileError], str, str]] = {
    "file too short": (lambda: HEADER.check_file(16383, "f"), DataTruncated, "16,383 bytes", "16,384"),
    "run": (lambda: HEADER.check_run(bytes(16), "f"), ForeignRun, HEADER.run_id.hex(), "00" * 16),
    "rank": (lambda: HEADER.check_kind(replace(KIND, rank=4), "f"), ForeignState, "found rank 3,", "rank 4."),
    "subgroup and size": (
        lambda: HEADER.check_kind(replace(KIND, subgroup=8, numel=999), "f"),
        ForeignState, "subgroup 7, numel 1000,", "subgroup 8, numel 999.",
    ),
    "format": (lambda: HEADER.check_kind(replace(KIND, weight_format=0), "f"), ForeignState, "format 1", "format 0"),
    "state": (lambda: HEADER.check_kind(replace(KIND, state_bytes=12), "f"), ForeignState, "bytes 10", "bytes 12"),
    "tensors": (
        lambda: HEADER.check_kind(replace(KIND, tensors="momentum:float32"), "f"),
        ForeignState, "tensors exp_avg:float32 exp_avg_sq:float32", "tensors momentum:float32",
    ),
    "rule": (lambda: HEADER.check_kind(replace(KIND, rule="lion"), "f"), ForeignState, "rule adamw", "rule lion"),
    "step": (lambda: HEADER.check_step(40, "f"), WrongStep, "step 41", "expected 40"),
    "block": (lambda: HEADER.check_block(1, 5, "f"), BlockDamaged, "0x00000005 in block 1 at byte 8,192", "0x01020304"),
    "weights": (lambda: HEADER.check_weights(9, "f"), WeightsMismatch, "0x1122334455667788", "0x0000000000000009"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "error", "found", "expected"), MISMATCHED.values(), ids=MISMATCHED.keys())
def test_each_mismatch_has_its_error(
    check: Callable[[], None], error: type[StateFileError], found: str, expected: str
) -> None:
    with pytest.raises(StateFileError) as caught:
        check()
    assert caught.type is error
    assert found in str(caught.value)
    assert expected in str(caught.value)


def test_a_damaged_block_is_named_for_programs_too() -> None:
    with pytest.raises(BlockDamaged) as caught:
        HEADER.check_block(2, 0, "f")
    assert (caught.value.file, caught.value.block, caught.value.offset) == ("f", 2, 4096 + 2 * 4096)


def test_what_matches_passes() -> None:
    HEADER.check_file(16384, "f")
    HEADER.check_file(1 << 40, "f")
    HEADER.check_run(bytes(range(16)), "f")
    HEADER.check_kind(replace(KIND), "f")
    HEADER.check_step(41, "f")
    HEADER.check_block(1, 0x01020304, "f")
    HEADER.check_weights(0x1122334455667788, "f")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run_id": b"short"}, "5 bytes"),
        ({"block_bytes": 512}, "multiple of 4096"),
        ({"block_bytes": 0}, "multiple of 4096"),
        ({"block_checksums": (1, 2)}, "need 3"),
        ({"step": -1}, "step is -1"),
        ({"weights_checksum": -1}, "weights_checksum is -1"),
    ],
)
def test_a_header_that_no_file_can_hold_is_a_mistake_of_the_caller(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(HEADER, **change)


@pytest.mark.parametrize("change", [{"rule": ""}, {"rule": "x" * 17}, {"rule": "ädam"}, {"numel": 0}, {"rank": -1}])
def test_a_kind_that_no_file_can_hold_is_too(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(KIND, **change)


def test_a_number_that_does_not_fit_is_said_when_it_is_packed() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        replace(HEADER, block_checksums=(1, 2, 1 << 32)).pack()
