"""FSDP2 under torchrun: each rank offloads the state of its own shards."""

from __future__ import annotations

import argparse
from pathlib import Path

import tidegate
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("fsdp2"), help="the checkpoint goes here")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, device = dist.get_rank(), "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)), torch.nn.Linear(128, 1)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Released gradients need our clipping: the norm is that of all ranks.
    offload = tidegate.Offload(gradients="release", subgroup_numel=10_000)
    with tidegate.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, offload=offload) as optimizer:
        tidegate.attach(optimizer, model, run="fsdp2", daemon=options.daemon)
        checkpoint = options.folder / "checkpoint"
        if checkpoint.exists():
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        for step in range(options.steps):
            seed = step * dist.get_world_size() + rank
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(device)
            loss = (model(x).squeeze() - x.square().mean(1)).square().mean()
            loss.backward()
            optimizer.log(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
        if rank == 0:
            shapes = {tuple(param.to_local().shape) for param in model.parameters()}
            print(f"{dist.get_world_size()} ranks, loss {loss.item():.4f}, shards of {sorted(shapes)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
