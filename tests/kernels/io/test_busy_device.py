"""A read of a device that is busy (EAGAIN) is repeated, but not for ever."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "kernels" / "src"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("busy") / "driver"
    sources = [Path(__file__).with_name("busy_device_driver.cpp"), SOURCES / "move_block.cpp", SOURCES / "checksum.cpp"]
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *map(str, sources)]
    subprocess.run([*command, "-pthread", "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("busy", "expected"),
    [(0, (0, 4096, 1)), (5, (0, 4096, 6)), (1000, (0, 4096, 1001)), (10**9, (errno.EAGAIN, 0, 1001))],
)
def test_a_busy_device_is_asked_again_but_not_for_ever(driver: Path, busy: int, expected: tuple[int, ...]) -> None:
    done = subprocess.run([str(driver), str(busy)], capture_output=True, text=True, timeout=60, check=True)
    assert tuple(map(int, done.stdout.split())) == expected
