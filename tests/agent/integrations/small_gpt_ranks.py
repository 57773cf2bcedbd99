"""One rank of a real torchrun job, for test_small_gpt: nanoGPT's script under DDP, with our optimizer and torch's.

Both are resumed from their own checkpoint in the middle; each rank reads other batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.agent.integrations.small_gpt import offloaded, train
from tests.agent.integrations.test_small_gpt import assert_alike


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    made = {}
    for name, build in (("ours", offloaded), ("theirs", torch.optim.AdamW)):
        own = folder / f"{name}-of-rank{dist.get_rank()}"
        own.mkdir()
        for last in (4, 8):
            made[name] = train(build, own, last, DistributedDataParallel, seed=1000 * dist.get_rank())
    assert_alike(made["ours"], made["theirs"])
    for weight in made["ours"]["model"].values():
        of_first = weight.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(weight, of_first), "ranks have parted"
    (folder / f"ddp-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
