"""One rank of a real torchrun job, for test_ddp: trains under DDP and holds its weights against the oracle's."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tidegate
from tests.agent.plain_adamw import PlainAdamW


def main(folder: Path, as_views: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(6)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=as_views)
    offload = tidegate.Offload(stride=2.0, subgroup_numel=400)
    early: list[int] = []
    copies: list[int] = []
    with tidegate.AdamW(model.parameters(), lr=0.01, offload=offload) as optimizer:
        tidegate.overlap_ddp(optimizer, ddp)
        optimizer.observers.append(lambda result, _: copies.append(sum(s.kind == "grad_d2h" for s in result.spans)))
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
        for step in range(12):
            optimizer.zero_grad(set_to_none=step % 3 > 0)
            micro_batches = 1 + (step % 4 == 3)
            expected = mean_gradients(model, 100 * step + rank, micro_batches)
            backward(ddp, 100 * step + rank, micro_batches)
            for param, mean in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad, mean)
            wait_for_copies(optimizer)
            early.append(len(optimizer.engine._executor.done_early()))
            changed = change_gradients(model, step)
            grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(list(model.parameters())), f"step {step}"
            if not changed and step > 1:
                assert copies[-1] == len([p for p in plan_of(optimizer) if p == "cpu"]), "something was copied twice"
        # The first backward is of one rank's making, bucket sizes settle after it: then all copies are early.
        assert min(early[2:]) == len([p for p in plan_of(optimizer) if p == "cpu"]), early
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


def backward(ddp: torch.nn.parallel.DistributedDataParallel, seed: int, micro_batches: int) -> None:
    for batch in range(micro_batches):
        x = inputs(seed, batch)
        if batch < micro_batches - 1:
            with ddp.no_sync():
                ddp(x).square().mean().backward()
        else:
            ddp(x).square().mean().backward()


def mean_gradients(model: torch.nn.Module, seed: int, micro_batches: int) -> list[torch.Tensor]:
    """What DDP should make of this batch: the mean over ranks of the sum over micro-batches."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for batch in range(micro_batches):
        alone(inputs(seed, batch)).square().mean().backward()
    grads = [param.grad for param in alone.parameters() if param.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def inputs(seed: int, batch: int) -> torch.Tensor:
    return torch.randn(4, 30, generator=torch.Generator().manual_seed(seed + 1000 * batch))


def change_gradients(model: torch.nn.Module, step: int) -> bool:
    """What users do between backward and step: clip, edit, edit through `.data`, drop. Whether any was changed."""
    params = list(model.parameters())
    if step % 5 == 1:
        torch.nn.utils.clip_grad_norm_(params, 0.01)
    elif step % 5 == 2 and params[3].grad is not None:
        params[3].grad[0] = 7.0
    elif step % 5 == 3 and params[2].grad is not None:
        params[2].grad.data.mul_(3.0)
    elif step % 5 == 4:
        params[4].grad = None
    return step % 5 > 0


def plan_of(optimizer: tidegate.AdamW) -> list[str]:
    return [where for where, _ in tidegate_place(len(optimizer.engine.layouts))]


def tidegate_place(count: int) -> list[tuple[str, str]]:
    from tidegate.plan import place_subgroups

    return list(place_subgroups(count, stride=2.0, static_ratio=0.0))


def wait_for_copies(optimizer: tidegate.AdamW) -> None:
    """Until all that can be copied before step() is; in the first steps buckets settle, and some cannot."""
    executor, wanted = optimizer.engine._executor, plan_of(optimizer).count("cpu")
    deadline = time.monotonic() + 2.0
    while len(executor.done_early()) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "views")
