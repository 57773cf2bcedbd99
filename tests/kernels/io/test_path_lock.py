"""The lock of a path in C++ alone; tests/agent/tiers/test_path_locks.py has what Python sees of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.services import ROOT

SOURCES = ROOT / "kernels" / "src"


@pytest.mark.torture
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_of_three_processes_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """A driver in C++ runs three processes with three threads each, whose waits time out or are interrupted."""
    program = tmp_path / "driver"
    sources = [Path(__file__).with_name("path_lock_driver.cpp"), SOURCES / "lock_file.cpp", SOURCES / "path_lock.cpp"]
    command = ["c++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run([*command, f"-I{SOURCES}", *map(str, sources), "-pthread", "-o", str(program)], check=True)
    lock = tmp_path / "locks" / "device.any.lock"
    done = subprocess.run([str(program), str(lock), "300"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["turns", "2700"]
