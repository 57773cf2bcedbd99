"""Accelerate with several ranks, for real: FSDP2 puts shards into the optimizer that was built from the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_ranks(folder: Path, module: str, *arguments: str) -> set[str]:
    """Marks of the ranks that came to the end."""
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *["-m", f"tests.agent.integrations.{module}", str(folder), *arguments],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name for path in folder.glob("*-[01]")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_train_as_with_torchs_adamw_and_resume(tmp_path: Path, kind: str) -> None:
    assert run_ranks(tmp_path, "accelerate_ranks", kind) == {f"{kind}-0", f"{kind}-1"}


@pytest.mark.slow
def test_the_programs_of_the_documentation_divide_and_train(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, "accelerate_ranks", "documented") == {"documented-0", "documented-1"}


@pytest.mark.slow
def test_the_trainer_with_fsdp2_trains_as_with_its_own_adamw(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, "trainer_fsdp_ranks") == {"trainer-0", "trainer-1"}
