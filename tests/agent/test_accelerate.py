"""Accelerate with several ranks, for real: FSDP2 puts shards into the optimizer that was built from the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_train_as_with_torchs_adamw_and_resume(tmp_path: Path, kind: str) -> None:
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *["-m", "tests.agent.accelerate_ranks", str(tmp_path), kind],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in tmp_path.glob(f"{kind}-*")} == {f"{kind}-0", f"{kind}-1"}
