"""The newest sound checkpoint: damage that only the data show is found before anything is loaded, and gone around."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tidegate
from tests.agent.checkpoints.saving import Run, flip
from tidegate.errors import BlockDamaged, ConfigError, ForeignState, StateFileError

SPAWN = mp.get_context("spawn")


def saved_by(run: Run, saved: Path, steps: int, rank: int = 0) -> list[tidegate.Checkpoint]:
    """One after each step, with the weights, the oldest first."""

    def save_also(folder: Path) -> None:
        torch.save([param.detach().clone() for param in run.params], folder / "model.pt")

    for step in range(steps):
        run.steps(step, step + 1)
        run.optimizer.save_checkpoint(saved, keep=steps, save_also=save_also)
    return tidegate.find_checkpoints(saved, rank)[::-1]


def resume(run: Run, found: tidegate.Checkpoint) -> None:
    """Weights, then state."""
    for param, weight in zip(run.params, torch.load(found.folder / "model.pt"), strict=True):
        param.data.copy_(weight)
    assert run.optimizer.load_checkpoint(found) == found


DAMAGE: dict[str, Callable[[tidegate.Checkpoint], Any]] = {
    "a block": lambda c: flip(c.folder / "000001.tide", -1),
    "a header": lambda c: flip(c.folder / "000001.tide", 30),
    "no state file": lambda c: (c.folder / "000002.tide").unlink(),
    "param groups": lambda c: flip(c.folder / "optimizer.pt", 100),
    "weights": lambda c: flip(c.folder / "model.pt", 100),
    "a manifest": lambda c: flip(c.directory / "rank0.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_newest_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Run() as run:
        first, second, third = saved_by(run, tmp_path, 3)
    DAMAGE[damage](third)
    found = tidegate.find_sound_checkpoint(tmp_path)
    assert found == second
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(third.directory) in warning
    assert "is damaged and skipped" in warning
    with Run() as before, Run() as other:
        before.steps(0, 2)
        resume(other, found)
        other.plain = before.plain
        other.steps(2, 4)
    DAMAGE[damage](second)
    assert tidegate.find_sound_checkpoint(tmp_path) == first
    DAMAGE[damage](first)
    assert tidegate.find_sound_checkpoint(tmp_path) is None
    assert tidegate.find_sound_checkpoint(tmp_path / "nothing") is None


def test_of_two_of_one_step_the_sound_one_is_loaded(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        sound = run.optimizer.save_checkpoint(tmp_path, keep=2)
        damaged = run.optimizer.save_checkpoint(tmp_path, keep=2)
        flip(damaged.folder / "000001.tide", -1)
        state = run.optimizer.state_dict()
        with pytest.raises(BlockDamaged):
            run.optimizer.load_checkpoint(tmp_path, step=1)
        assert tidegate.find_sound_checkpoint(tmp_path) == sound
        assert run.optimizer.load_checkpoint(sound) == sound
        torch.testing.assert_close(run.optimizer.state_dict(), state, rtol=0, atol=0)
        with pytest.raises(StateFileError):
            run.optimizer.load_checkpoint(damaged)
        run.optimizer.load_checkpoint(sound)
        with pytest.raises(ConfigError, match="step=1"):
            run.optimizer.load_checkpoint(sound, step=1)
        run.steps(1, 2)


def rank_main(rank: int, base: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{base / 'meeting'}", rank=rank, world_size=2)
    saved = base / "saved"
    with Run() as run:
        first, second, third = saved_by(run, saved, 3, rank)
        if rank == 1:
            flip(third.folder / "000001.tide", -1)
        else:
            os.unlink(second.folder / "optimizer.pt")
        dist.barrier()
        assert tidegate.find_sound_checkpoint(saved) == first
        resume(run, first)
        with pytest.raises(ForeignState, match="rank"):
            run.optimizer.load_checkpoint(tidegate.find_checkpoints(saved, 1 - rank)[-1])
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_get_the_same_one(tmp_path: Path) -> None:
    ranks = [SPAWN.Process(target=rank_main, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
