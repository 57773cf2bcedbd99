"""One rank of a real torchrun job, for test_ddp: trains under DDP and holds its weights against the oracle's."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tidegate
from tests.agent.plain import PlainAdamW


def main(folder: Path, as_views: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(6)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=as_views)
    offload = tidegate.Offload(stride=2.0, subgroup_numel=400)
    early: list[int] = []
    with tidegate.AdamW(model.parameters(), lr=0.01, offload=offload) as optimizer:
        tidegate.overlap_ddp(optimizer, ddp)
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
        for step in range(12):
            optimizer.zero_grad(set_to_none=step % 3 > 0)
            backward(ddp, 100 * step + rank, micro_batches=1 + (step % 4 == 3))
            wait_for_copies(optimizer)
            early.append(len(optimizer.engine._executor.done_early()))
            change_gradients(model, step)
            grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(list(model.parameters())), f"step {step}"
        # The first backward is of one rank's making, bucket sizes settle after it: then all copies are early.
        assert min(early[2:]) == len([p for p in plan_of(optimizer) if p == "cpu"]), early
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


def backward(ddp: torch.nn.parallel.DistributedDataParallel, seed: int, micro_batches: int) -> None:
    for batch in range(micro_batches):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed + 1000 * batch))
        if batch < micro_batches - 1:
            with ddp.no_sync():
                ddp(x).square().mean().backward()
        else:
            ddp(x).square().mean().backward()


def change_gradients(model: torch.nn.Module, step: int) -> None:
    """What users do between backward and step: clip, edit, edit through `.data`, drop."""
    params = list(model.parameters())
    if step % 5 == 1:
        torch.nn.utils.clip_grad_norm_(params, 0.01)
    elif step % 5 == 2 and params[3].grad is not None:
        params[3].grad[0] = 7.0
    elif step % 5 == 3 and params[2].grad is not None:
        params[2].grad.data.mul_(3.0)
    elif step % 5 == 4:
        params[4].grad = None


def plan_of(optimizer: tidegate.AdamW) -> list[str]:
    return [where for where, _ in tidegate_place(len(optimizer.engine.layouts))]


def tidegate_place(count: int) -> list[tuple[str, str]]:
    from tidegate.plan import place

    return list(place(count, stride=2.0, static_ratio=0.0))


def wait_for_copies(optimizer: tidegate.AdamW) -> None:
    """Until no copy is under way that could begin before step()."""
    end = time.monotonic() + 10
    executor = optimizer.engine._executor
    while time.monotonic() < end:
        before = len(executor.done_early())
        time.sleep(0.01)
        if len(executor.done_early()) == before > 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "views")
