"""DDP: gradients are copied when their bucket was reduced, and what is done to them afterwards still counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tidegate
from tidegate.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("buckets", ["views", pytest.param("copies", marks=pytest.mark.slow)])
def test_two_ranks_equal_the_oracle_with_early_copies(buckets: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, "ddp_ranks", buckets)


def run_ranks(folder: Path, module: str, *arguments: str) -> None:
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *["-m", f"tests.agent.integrations.{module}", str(folder), *arguments],
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} == {"done-0", "done-1"}


@pytest.mark.slow
def test_optimizers_one_after_the_other_share_the_models_hook(tmp_path: Path) -> None:
    """DDP takes one communication hook for the life of a model."""
    run_ranks(tmp_path, "ddp_rounds")


def test_another_model_is_refused() -> None:
    model = torch.nn.Linear(3, 3)
    with tidegate.AdamW(model.parameters()) as optimizer, pytest.raises(ConfigError, match="DistributedDataParallel"):
        tidegate.overlap_ddp(optimizer, model)
