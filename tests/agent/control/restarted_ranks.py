"""One rank of a real torchrun job that fails twice, for test_restarts: trains under DDP, resumes, and attaches."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tidegate

STEPS = 12
FAILS_AT = (4, 9)
LR = 1e-2


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def fail(how: str, mark: Path) -> None:
    if mark.exists():
        return
    mark.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("on purpose")


def main(daemon: str, token: str, how: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, saved = dist.get_rank(), folder / "saved.pt"
    model = DistributedDataParallel(network())
    optimizer = tidegate.AdamW(model.parameters(), lr=LR, offload=tidegate.Offload(device="emulated", cpu_threads=1))
    tidegate.attach(optimizer, model, run="restarted", daemon=daemon, token=token)
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(optimizer.num_steps, STEPS):
        if rank == 1 and step in FAILS_AT:
            fail(how, folder / f"failed-at-{step}")
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "new.pt")
            (folder / "new.pt").replace(saved)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
