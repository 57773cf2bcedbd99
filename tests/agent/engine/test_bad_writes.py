"""Writes of the system that hang or fail, below lanes that run them without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("writes") / "writes.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(HERE / "writes.c"), "-o", str(library), "-ldl"], check=True)
    return library


def train(preloaded: Path, base: Path, writes: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"LD_PRELOAD": str(preloaded), "FLAG": str(base / "flag"), "WRITES": writes}
    command = [sys.executable, "-m", "tests.agent.engine.trains_with_bad_writes", str(base)]
    return subprocess.run(
        command,
        cwd=HERE.parents[2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_ends_although_a_write_never_does(preloaded: Path, tmp_path: Path) -> None:
    done = train(preloaded, tmp_path, "hang")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stuck Lane "), done.stderr


def test_writes_that_were_prepared_do_not_go_to_a_path_that_was_retired_since(preloaded: Path, tmp_path: Path) -> None:
    done = train(preloaded, tmp_path, "fail")
    assert done.returncode == 0, done.stderr
    retired, *residence = done.stdout.split()
    # A lane of a path runs two ops at once: the next write may have begun when the first one fails.
    assert len(residence) == 8
    assert residence.count(retired) <= 1
