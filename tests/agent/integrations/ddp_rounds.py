"""One rank of a real torchrun job, for test_ddp: optimizers that come one after the other to one DDP model, as in a
notebook, two that divide its parameters, one whose early copies are stopped, and a model whose communication hook is
somebody else's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tidegate
from tests.agent.integrations.ddp_ranks import backward, mean_gradients, plan_of, wait_for_copies
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import ConfigError

OFFLOAD = tidegate.Offload(stride=2.0, subgroup_numel=400, cpu_threads=1)


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(6)))
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


def plain_of(optimizer: tidegate.AdamW) -> PlainAdamW:
    return PlainAdamW([dict(group) for group in optimizer.param_groups])


def train(
    ddp: DistributedDataParallel,
    optimizers: Sequence[tidegate.AdamW],
    first: int,
    plains: Sequence[PlainAdamW] | None = None,
) -> list[int]:
    """Four steps, held against the oracle's (`plains`, where they go on); how many updates each of these optimizers had
    begun early at the end."""
    plains = plains or [plain_of(optimizer) for optimizer in optimizers]
    early = []
    for step in range(first, first + 4):
        expected = mean_gradients(ddp.module, 100 * step + dist.get_rank(), 1)
        ddp.zero_grad()
        backward(ddp, 100 * step + dist.get_rank(), 1)
        for param, mean in zip(ddp.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean)
        for optimizer in optimizers:
            if optimizer.gradient_source.collectives:
                wait_for_copies(optimizer)
        early = [len(optimizer.engine._executor.done_early()) for optimizer in optimizers]
        for optimizer, plain in zip(optimizers, plains, strict=True):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [None if param.grad is None else param.grad.clone() for param in params]
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params), f"step {step}"
    return early


def rounds(ddp: DistributedDataParallel) -> None:
    """The optimizer of the round before is closed, or taken over from."""
    kept = []
    for number in range(3):
        optimizer = tidegate.AdamW(ddp.parameters(), lr=0.01, offload=OFFLOAD)
        for _ in range(2):  # the line may run twice
            tidegate.overlap_ddp(optimizer, ddp)
        assert train(ddp, [optimizer], 10 * number) == [plan_of(optimizer).count("cpu")], f"round {number}"
        kept.append(optimizer)
        if number == 1:
            optimizer.close()
    without = tidegate.AdamW(ddp.parameters(), lr=0.01, offload=OFFLOAD)
    train(ddp, [without], 30)
    without.close()


def halves(ddp: DistributedDataParallel) -> None:
    params = list(ddp.parameters())
    both = [tidegate.AdamW(half, lr=0.01, offload=OFFLOAD) for half in (params[::2], params[1::2])]
    for optimizer in both:
        tidegate.overlap_ddp(optimizer, ddp)
    assert train(ddp, both, 40) == [plan_of(optimizer).count("cpu") for optimizer in both]
    for optimizer in both:
        optimizer.close()


def after_close(ddp: DistributedDataParallel) -> None:
    """Nothing is copied early any more, and results stay exact: DDP keeps the hook, which averages."""
    with tidegate.AdamW(ddp.parameters(), lr=0.01, offload=OFFLOAD) as optimizer:
        plains, early = [plain_of(optimizer)], [plan_of(optimizer).count("cpu")]
        replaced = tidegate.overlap_ddp(optimizer, ddp)
        with tidegate.overlap_ddp(optimizer, ddp) as overlap:
            replaced.close()
            assert train(ddp, [optimizer], 60, plains) == early, "the newer one goes on"
        for _ in range(2):
            overlap.close()
        assert train(ddp, [optimizer], 70, plains) == [0]
        tidegate.overlap_ddp(optimizer, ddp)
        assert train(ddp, [optimizer], 80, plains) == early


def somebody_elses_hook() -> None:
    ddp = wrapped()
    ddp.register_comm_hook(None, allreduce_hook)
    with tidegate.AdamW(ddp.parameters(), lr=0.01, offload=OFFLOAD) as optimizer:
        with pytest.raises(ConfigError, match=r"communication hook.*has one already.*leave out overlap_ddp"):
            tidegate.overlap_ddp(optimizer, ddp)
        assert train(ddp, [optimizer], 50) == [0]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ddp = wrapped()
    rounds(ddp)
    halves(ddp)
    after_close(ddp)
    somebody_elses_hook()
    (folder / f"done-{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
