"""Threads that move data leave the cores that compute."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "src"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("cores") / "driver"
    sources = [Path(__file__).with_name("computing_cores_driver.cpp"), SOURCES / "computing_cores.cpp"]
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *map(str, sources)]
    subprocess.run([*command, "-pthread", "-o", str(program)], check=True)
    return program


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_that_moves_data_leaves_the_cores_that_compute(driver: Path) -> None:
    number = len(os.sched_getaffinity(0))
    done = subprocess.run([str(driver)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "nothing computes: all",
        "another core computes: all",
        f"the core computes: {number - 1} of {number}, left: 1",
        "a forked child is bound: 0",
        f"just after the computation: {number - 1} of {number}",
        "some time after the computation: all",
        "all cores are allowed again: all",
        "all cores compute: all",
    ]
