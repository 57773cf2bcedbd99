"""One rank of a torchrun job over hosts, for test_two_hosts: trains until the file `end` is there, and writes each step
with the knobs that it ran with."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tidegate

PORT = 9400


def main(folder: Path, daemon: str, address: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    offload = tidegate.Offload(stride=2.0, subgroup_numel=4_000, cpu_threads=1)
    with (
        (folder / f"steps-{rank}").open("w", buffering=1) as steps,
        tidegate.AdamW(model.parameters(), lr=1e-4, offload=offload) as optimizer,
        tidegate.attach(
            optimizer, model, run="two-hosts", daemon=daemon, metrics_bind="0.0.0.0", metrics_port=PORT,
            advertise_host=address,
        ) as attachment,
    ):  # fmt: skip
        for step in range(1, 1_000_000):
            optimizer.zero_grad()
            torch.manual_seed(1000 * step + rank)
            ddp(torch.randn(8, 64)).square().mean().backward()
            ran_with = f"{attachment.generation} {optimizer.effective_knobs()['stride']}"
            optimizer.step()
            optimizer.log(tokens=8)
            steps.write(f"{step} {ran_with}\n")
            end = torch.tensor([float((folder / "end").exists())])
            dist.all_reduce(end, op=dist.ReduceOp.MAX)
            if end.item():
                break
            time.sleep(0.02)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        (folder / f"weights-{rank}").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
