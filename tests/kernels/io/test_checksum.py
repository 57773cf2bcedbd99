"""CRC-32C: the published values; the same by products, instruction, tables and on another CPU; whole or in parts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate import kernels

SOURCES = Path(__file__).parents[3] / "kernels" / "src"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
POLYNOMIAL = 0x82F63B78
# RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms.
PUBLISHED = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]
# Around words, triples of short streams (768 bytes), triples of long ones (12288), both together, and folds of 256
# bytes from the shortest (1024) on.
SIZES = [0, 1, 7, 8, 9, 255, 767, 768, 769, 12_287, 12_288, 12_289, 13_056, 13_063, 36_864, 40_001]
SIZES += [1023, 1024, 1025, 1032, 1279, 1280, 1281, 2047, 2048, 2049]

DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "checksum.h"
int main(int, char** argv) {
  std::vector<unsigned char> data(std::atoi(argv[1]));
  if (std::fread(data.data(), 1, data.size(), stdin) != data.size()) return 1;
  std::printf("%u %u", tidegate::crc32c(data.data(), data.size(), 7),
              tidegate::crc32c_by_tables(data.data(), data.size(), 7));
}
"""


def checksum(data: bytes, seed: int = 0) -> int:
    array = np.frombuffer(data, np.uint8)
    return kernels.crc32c(array.ctypes.data, len(array), seed)


def bit_by_bit(data: bytes, seed: int = 0) -> int:
    """The definition."""
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


def some_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.fixture(params=kernels.instruction_sets())
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.instruction_set()
    kernels.use_instruction_set(request.param)
    yield
    kernels.use_instruction_set(before)


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize(("data", "expected"), PUBLISHED)
def test_published_values(data: bytes, expected: int) -> None:
    assert checksum(data) == expected


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_definition(size: int) -> None:
    data = some_bytes(size)
    assert checksum(data) == bit_by_bit(data)
    assert checksum(data, seed=0xDEADBEEF) == bit_by_bit(data, 0xDEADBEEF)


@pytest.mark.usefixtures("_instruction_set")
def test_addresses_need_no_alignment() -> None:
    data = np.frombuffer(some_bytes(40_000), np.uint8)
    for skip in range(9):
        part = data[skip : skip + 30_001]
        assert kernels.crc32c(part.ctypes.data, len(part)) == checksum(part.tobytes())


@settings(max_examples=examples(50))
@given(size=st.integers(0, 3_000), skip=st.integers(0, 63), seed=st.integers(0, 2**32 - 1))
def test_every_instruction_set_equals_the_definition(size: int, skip: int, seed: int) -> None:
    data, before = some_bytes(size + skip), kernels.instruction_set()
    array, expected = np.frombuffer(data, np.uint8)[skip:], bit_by_bit(data[skip:], seed)
    try:
        for name in kernels.instruction_sets():
            kernels.use_instruction_set(name)
            assert kernels.crc32c(array.ctypes.data, size, seed) == expected
    finally:
        kernels.use_instruction_set(before)


@settings(max_examples=examples(200))
@given(size=st.integers(0, 60_000), cut=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_a_seed_goes_on_from_what_stands_before(size: int, cut: float, seed: int) -> None:
    data = some_bytes(size)
    place = int(cut * size)
    assert checksum(data[place:], checksum(data[:place], seed)) == checksum(data, seed)


@given(place=st.integers(0, 8 * 20_000 - 1))
def test_any_flipped_bit_is_seen(place: int) -> None:
    data = bytearray(some_bytes(20_000))
    before = checksum(bytes(data))
    data[place // 8] ^= 1 << place % 8
    assert checksum(bytes(data)) != before


def test_bad_arguments() -> None:
    assert kernels.crc32c(0, 0, 5) == 5
    with pytest.raises(ValueError, match="address is 0"):
        kernels.crc32c(0, 1)
    with pytest.raises(ValueError, match="nbytes is -1"):
        kernels.crc32c(4096, -1)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in (COMPILER, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed}")
    program = tmp_path_factory.mktemp("aarch64") / "driver"
    source = program.with_suffix(".cpp")
    source.write_text(DRIVER)
    flags = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-static", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *flags, SOURCES / "checksum.cpp", source, "-o", program], check=True)
    return program


@pytest.mark.parametrize("size", SIZES)
def test_aarch64_says_the_same(driver: Path, size: int) -> None:
    data = some_bytes(size)
    done = subprocess.run([EMULATOR, driver, str(size)], input=data, stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [str(checksum(data, 7)).encode()] * 2
