"""Ranks that are tuned move together: one proposal of several, one that a rank has no room for after all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.tuner.tuner import FIRST_SEARCH_STEPS

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_ranks_move_between_the_same_two_steps(tmp_path: Path) -> None:
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *["-m", "tests.agent.control.tuned_ranks", str(tmp_path)],
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    assert one["heard"] == other["heard"], "each rank's tuner hears of the slower one's update"
    compared = one["compared"]
    assert compared == other["compared"] > FIRST_SEARCH_STEPS, "the comparison ends for both at once"
    assert one["strides"][:compared] == other["strides"][:compared]
    assert one["strides"][: FIRST_SEARCH_STEPS + 1] == [2.0] * FIRST_SEARCH_STEPS + [3.0], "what every rank can have"
    # What rank 1 refuses, rank 0 has for one step: then all are where they were.
    assert 8.0 not in other["strides"]
    assert one["strides"].count(8.0) == 1
    assert [a for a, b in zip(one["strides"], other["strides"], strict=True) if a != b] == [8.0]
    assert "Not tried: there was room a moment ago" in other["said"]
    assert "another rank" in one["said"]
