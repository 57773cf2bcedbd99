"""The benches of strides at toy size: they must work before anybody reads their figures. Nothing is said of these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TOY = ("--json", "--numel", "240000", "--subgroups", "6", "--rounds", "2", "--cpu", "1e9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("interleaving.py", ["--device", "emulated", "--steps", "1", "--tuning-steps", "2"], {
            "update_seconds", "speedup_over_cpu", "best_fixed", "auto_by_best_fixed", "twinflow_by_auto_same_residents",
        }),
        ("tuner.py", ["--settling-steps", "2", "--following-steps", "2", "--noisy-steps", "2"], {
            "before", "halved", "from_worst", "after_halving", "with_noise",
        }),
    ],
)  # fmt: skip
def test_it_runs_and_tells_what_it_ran_on(script: str, options: list[str], expected: set[str]) -> None:
    command = [sys.executable, str(BENCH / script), *TOY, *options]
    done = subprocess.run(
        command, cwd=BENCH, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert expected <= set(found)
    assert found["device"] == "emulated"
    if script == "interleaving.py":
        assert set(found["update_seconds"]) >= {
            "all on the CPU",
            "twinflow",
            "auto",
            *(f"stride {k}" for k in range(1, 9)),
        }
        assert "none about a GPU" in found["claims"]
        assert all(row["low"] <= row["median"] <= row["high"] for row in found["update_seconds"].values())
