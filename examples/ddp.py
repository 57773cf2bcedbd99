"""DDP under torchrun: micro-batches, a GradScaler, clipping, and a checkpoint that all ranks save and load."""

from __future__ import annotations

import argparse
from pathlib import Path

import tidegate
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def get_batch(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    return x, x.square().mean(1)


def train(model: torch.nn.Module, device: torch.device, folder: Path, options: argparse.Namespace) -> None:
    offload = tidegate.Offload(paths={"nvme": folder / "nvme"}, host_cache=0, subgroup_numel=10_000)
    dtype, checkpoints = getattr(torch, options.dtype), folder / "checkpoints"
    steps, daemon = options.steps, options.daemon

    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = tidegate.find_sound_checkpoint(checkpoints)  # on every rank; None at the first start
    if found and rank == 0:
        model.load_state_dict(torch.load(found.folder / "model.pt"))
    ddp = DistributedDataParallel(model)  # sends the weights of rank 0 to all ranks
    optimizer = tidegate.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, offload=offload)
    if dtype != torch.float16:  # an enabled GradScaler makes early copies useless
        tidegate.overlap_ddp(optimizer, ddp)
    tidegate.attach(optimizer, ddp, run="ddp", daemon=daemon)  # on every rank, with the same run
    if found:
        optimizer.load_checkpoint(found)  # on every rank, after the weights
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    first = optimizer.num_steps
    for step in range(first, first + steps):
        for micro in range(MICRO_BATCHES):
            ddp.require_backward_grad_sync = micro == MICRO_BATCHES - 1  # or: with ddp.no_sync():
            x, y = get_batch((step * MICRO_BATCHES + micro) * ranks + rank, device)
            with torch.autocast(device.type, dtype):  # the weights stay in fp32
                loss = (ddp(x).squeeze() - y).square().mean() / MICRO_BATCHES
            scaler.scale(loss).backward()
        optimizer.log(loss=loss.item() * MICRO_BATCHES)
        scaler.step(optimizer)  # max_grad_norm clips: neither unscale_ nor clip_grad_norm_
        scaler.update()
        optimizer.zero_grad()

    # Every rank calls it; the weights, which all ranks have, are saved by rank 0.
    save_weights = (lambda to: torch.save(model.state_dict(), to / "model.pt")) if rank == 0 else None
    optimizer.save_checkpoint(checkpoints, keep=2, save_also=save_weights)
    optimizer.close()

    if rank == 0:
        print(f"{ranks} ranks, steps {first} to {first + steps}, loss {loss.item() * MICRO_BATCHES:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("ddp"), help="path and checkpoints go here")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the forward")
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")  # before the optimizer is built
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    (options.folder / "nvme").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)).to(device)
    train(model, device, options.folder, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
