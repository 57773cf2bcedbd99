"""FSDP2: each rank updates its shards, and the gathered model is that of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_ranks(count: int, folder: Path, what: str) -> set[str]:
    """Marks of the ranks that came to the end."""
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"],
        *["-m", "tests.agent.integrations.fsdp_ranks", str(folder), what],
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name for path in folder.glob(f"{what}-*")}


@pytest.mark.slow
def test_shards_equal_the_oracle_and_a_checkpoint_serves_another_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, "save") == {"save-0", "save-1"}
    assert run_ranks(4, tmp_path, "load") == {f"load-{rank}" for rank in range(4)}


@pytest.mark.slow
def test_under_tensor_parallelism_norms_are_of_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(4, tmp_path, "twice") == {f"twice-{rank}" for rank in range(4)}
