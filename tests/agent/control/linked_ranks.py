"""One rank of a real torchrun job, for test_daemon_link: trains until told to stop, and writes which stride each
step had."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tidegate
from tests.agent.training import Training


def main(url: str, token: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    strides: list[str] = []
    # Rank 1 has less device memory, and says no to what does not fit there.
    training = Training(device_memory_bytes=200_000_000 if rank == 0 else 40_000_000)
    with training.optimizer:
        tidegate.attach(training.optimizer, training.model, run="ranks", daemon=url, token=token)
        while True:
            strides.append(str(training.optimizer.effective_knobs()["stride"]))
            training.step()
            stop = torch.tensor([int((folder / "stop").exists())])
            dist.all_reduce(stop)
            if stop.item():
                break
        (folder / f"strides-{rank}").write_text("\n".join(strides))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
