"""Checkpoints of two ranks, each with state of its own: complete when both have written theirs, or not at all."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tidegate
from tidegate.agent.checkpoints import background as draining
from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.manifest import Manifest
from tidegate.errors import CheckpointFailed, ForeignState, NoCheckpoint

SPAWN = mp.get_context("spawn")


def rank_main(rank: int, base: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{base / 'meeting'}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    saved, param = base / "saved", torch.nn.Parameter(torch.full((500,), float(rank)))
    offload = tidegate.Offload(paths={"disk": base / "disk"}, host_cache=0, subgroup_numel=100, cpu_threads=1)
    with tidegate.AdamW([param], offload=offload) as optimizer:

        def step() -> None:
            param.grad = torch.full((500,), 1.0 + rank)
            optimizer.step()

        step()
        made = optimizer.save_checkpoint(saved)
        assert made.folder.name.startswith(f"rank{rank}-")
        step()

        def fail_on_one(_: Path) -> None:
            if rank == 1:
                raise RuntimeError("the disk of this node")

        with pytest.raises(RuntimeError if rank == 1 else CheckpointFailed):
            optimizer.save_checkpoint(saved, save_also=fail_on_one)
        dist.barrier()
        assert [found.step for found in tidegate.find_checkpoints(saved, rank)] == [1]
        dist.barrier()
        step()  # the spare files of rank 0 were to come from a checkpoint that is still there
        optimizer.save_checkpoint(saved)
        dist.barrier()
        assert [found.step for found in tidegate.find_checkpoints(saved, rank)] == [3]
        before = optimizer.state_dict()["state"][0]["exp_avg"]
    with tidegate.AdamW([param], offload=tidegate.Offload(cpu_threads=1)) as optimizer:
        optimizer.load_checkpoint(saved)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
        optimizer.save_checkpoint(saved)
    drained_on_both_or_on_none(rank, base)
    torch.save(param.data, base / f"weights-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def drained_on_both_or_on_none(rank: int, base: Path) -> None:
    """Two checkpoints in the background, of which rank 1 cannot write its part of the second."""
    drained, param = base / "drained", torch.nn.Parameter(torch.full((500,), float(rank)))
    offload = tidegate.Offload(paths={"disk": base / "disk"}, host_cache=10_000, subgroup_numel=100, cpu_threads=1)

    def found() -> list[int]:
        dist.barrier()
        steps = [one.step for one in tidegate.find_checkpoints(drained, rank)]
        dist.barrier()
        return steps

    with tidegate.AdamW([param], offload=offload) as optimizer:

        def begin() -> PendingCheckpoint:
            param.grad = torch.full((500,), 1.0 + rank)
            optimizer.step()
            return optimizer.begin_checkpoint(drained)

        assert optimizer.engine.store is not None
        begin().result()
        assert begin().result().step == 2
        assert found() == [2, 1], "older ones go when the ranks meet"
        assert optimizer.engine.store.last_checkpoint == str(drained / "step-1")
        write = draining.write_state
        if rank == 1:
            draining.write_state = refused
        pending = begin()
        pending._ended.wait()
        draining.write_state = write
        assert found() == [2]
        assert optimizer.engine.store.last_checkpoint == str(drained / "step-2")
        with pytest.raises(CheckpointFailed, match="this node" if rank == 1 else "Another rank"):
            optimizer.begin_checkpoint(drained)
        assert optimizer.begin_checkpoint(drained).result().step == 3
        assert found() == [3, 2]
        optimizer.save_checkpoint(drained)
        assert found() == [3]


def refused(*_: Any) -> None:
    raise OSError("the disk of this node")


@pytest.mark.slow
def test_two_ranks_have_one_checkpoint_or_none(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    ranks = [SPAWN.Process(target=rank_main, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    saved = tmp_path / "saved"
    assert len(os.listdir(saved)) == 1, "the one that rank 0 alone had written, or remains of it"

    param = torch.nn.Parameter(torch.load(tmp_path / "weights-0.pt"))
    with tidegate.AdamW([param]) as alone:
        with pytest.raises(ForeignState, match=r"2 ranks.* of 1"):
            alone.load_checkpoint(saved)
        (step,) = saved.iterdir()
        shutil.copy(step / "rank1.json", tmp_path / "kept")
        (step / "rank1.json").unlink()
        with pytest.raises(NoCheckpoint):
            alone.load_checkpoint(saved)
        assert tidegate.find_checkpoints(saved) == []
        (step / "rank1.json").write_bytes((step / "rank0.json").read_bytes())
        assert tidegate.find_checkpoints(saved) == [], "rank 0 twice is not two ranks"
        theirs = Manifest.unpack((tmp_path / "kept").read_bytes(), tmp_path / "kept")
        (step / "rank1.json").write_bytes(replace(theirs, attempt="another").pack())
        assert tidegate.find_checkpoints(saved) == [], "parts of two attempts"
        shutil.copy(tmp_path / "kept", step / "rank1.json")
        assert len(tidegate.find_checkpoints(saved)) == 1
