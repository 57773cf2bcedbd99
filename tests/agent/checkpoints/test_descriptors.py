"""Checkpoints in a process that can open no more files: an error with a name, and the next one works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tidegate
from tests.agent.checkpoints.refused import descriptors_left
from tests.agent.checkpoints.saving import Run, both, names_in
from tidegate.errors import CheckpointFailed, StorageError

ENOUGH = 40
"""Descriptors with which a checkpoint can be written."""


@pytest.mark.parametrize("way", ["save_checkpoint", "begin_checkpoint"])
def test_a_checkpoint_without_descriptors_is_a_named_error(tmp_path: Path, disk: Path, memory: Path, way: str) -> None:
    saved = tmp_path / "saved"
    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        first = run.optimizer.save_checkpoint(saved, keep=2, save_also=lambda at: (at / "mine").write_text("x"))
        state = run.optimizer.state_dict()
        told = []
        for left in range(ENOUGH):
            try:
                with descriptors_left(left):
                    made = getattr(run.optimizer, way)(saved, keep=2)
                    made = made.result() if way == "begin_checkpoint" else made
                break
            except CheckpointFailed as error:
                told.append(str(error))
                assert tidegate.find_checkpoints(saved) == [first], "the one before is as it was"
                first.verify()
        assert told
        assert all("Too many open files" in one for one in told), told
        assert all(".." not in one for one in told), told
        assert names_in(saved) == ["step-1", made.directory.name], "what could not be removed then is gone"
        torch.testing.assert_close(run.optimizer.state_dict(), state, rtol=0, atol=0)
        run.steps(1, 3)
        run.optimizer.save_checkpoint(saved, keep=1)
        assert names_in(saved) == ["step-3"]
        run.optimizer.load_checkpoint(saved)
        run.steps(3, 4)


def test_the_first_checkpoint_without_descriptors_is_a_named_error(tmp_path: Path, disk: Path, memory: Path) -> None:
    """Not even the lock file can be opened."""
    with Run(**both(disk, memory)) as run:
        run.steps(0, 1)
        with descriptors_left(0), pytest.raises(CheckpointFailed, match="Too many open files"):
            run.optimizer.save_checkpoint(tmp_path / "saved")
        assert run.optimizer.save_checkpoint(tmp_path / "saved").step == 1


def test_a_load_without_descriptors_is_a_named_error(tmp_path: Path, disk: Path, memory: Path) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        run.optimizer.save_checkpoint(tmp_path, save_also=lambda at: (at / "mine").write_text("x"))
        state = run.optimizer.state_dict()
        told = []
        for left in range(ENOUGH):
            try:
                with descriptors_left(left):
                    run.optimizer.load_checkpoint(tmp_path)
                break
            except StorageError as error:
                told.append(str(error))
        assert told
        assert all("Too many open files" in one for one in told), told
        torch.testing.assert_close(run.optimizer.state_dict(), state, rtol=0, atol=0)
        run.steps(2, 3)
        assert [found.step for found in tidegate.find_checkpoints(tmp_path)] == [2]
        assert os.listdir(tmp_path / "step-2")
