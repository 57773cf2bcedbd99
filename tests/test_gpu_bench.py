"""bench/gpu.sh at toy size on the emulated device: the script must work before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def gpu_sh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bench" / "gpu.sh"), *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, cwd="/", capture_output=True, text=True, check=False
    )


def test_every_stage_runs_and_none_runs_twice(tmp_path: Path) -> None:
    done = gpu_sh("--dry", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"links", "tests", "parity", "updates"}
    assert all(result["dry"] for result in found.values())
    assert found["tests"]["counts"]["tests"] > 50
    assert found["parity"]["weights_unlike_the_oracle"] == 0
    assert found["parity"]["largest_relative_difference_of_losses"] < 1e-4
    assert {row["stride"] for row in found["updates"]["settings"]} >= {"off", 3.0, 6.0}
    assert all(0 < row["share_of_bound"] < 1 for row in found["updates"]["settings"])
    again = gpu_sh("--dry", "--out", str(tmp_path))
    assert again.stdout.count("done already") == 4


def test_a_stage_that_fails_leaves_no_result(tmp_path: Path) -> None:
    failed = gpu_sh("--dry", "--out", str(tmp_path), "updates")
    assert failed.returncode == 1
    assert "`links` comes first" in failed.stderr
    assert not (tmp_path / "updates.json").exists()


def test_what_it_does_not_know_is_answered_with_its_usage() -> None:
    wrong = gpu_sh("--fast")
    assert wrong.returncode == 2
    assert "bench/gpu.sh [--dry] [--out OUT] [STAGE...]" in wrong.stderr
