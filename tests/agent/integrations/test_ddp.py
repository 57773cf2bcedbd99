"""DDP: gradients are copied when their bucket was reduced, and what is done to them afterwards still counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tidegate
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import ConfigError, ParameterError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("buckets", ["views", pytest.param("copies", marks=pytest.mark.slow)])
def test_two_ranks_equal_the_oracle_with_early_copies(buckets: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, "ddp_ranks", buckets)


def run_ranks(folder: Path, module: str, *arguments: str) -> None:
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *["-m", f"tests.agent.integrations.{module}", str(folder), *arguments],
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} == {"done-0", "done-1"}


@pytest.mark.slow
def test_optimizers_one_after_the_other_share_the_models_hook(tmp_path: Path) -> None:
    """DDP takes one communication hook for the life of a model."""
    run_ranks(tmp_path, "ddp_rounds")


def test_another_model_is_refused() -> None:
    model = torch.nn.Linear(3, 3)
    with tidegate.AdamW(model.parameters()) as optimizer, pytest.raises(ConfigError, match="DistributedDataParallel"):
        tidegate.overlap_ddp(optimizer, model)  # type: ignore[arg-type]


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_what_is_refused_leaves_the_model_without_a_hook() -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    with tidegate.AdamW(torch.nn.Linear(3, 3).parameters()) as other:
        with pytest.raises(ConfigError, match="without any parameter of the optimizer"):
            tidegate.overlap_ddp(other, ddp)
        with pytest.raises(ConfigError, match=r"overlap_ddp\(\) was given an AdamW of torch\.optim"):
            tidegate.overlap_ddp(torch.optim.AdamW(ddp.parameters()), ddp)
    with tidegate.AdamW(ddp.parameters(), offload=tidegate.Offload(gradients="release")) as released:
        with pytest.raises(ConfigError, match=r'Offload\(gradients="keep"\)'):
            tidegate.overlap_ddp(released, ddp)
        assert not released.gradient_source.collectives
        with pytest.raises(ConfigError, match=r"DDP.*gradients='keep'"):
            tidegate.attach(released, ddp, run="released")
        with pytest.raises(ParameterError, match=r"\(DDP\) and GradScaler need gradients='keep'"):
            ddp(torch.ones(1, 3)).sum().backward()
    ddp.register_comm_hook(None, allreduce_hook)  # DDP takes one hook: it has none yet


@pytest.mark.usefixtures("one_rank")
def test_after_close_results_are_exact_and_nothing_comes_reduced() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(3))))
    params = list(ddp.parameters())
    with tidegate.AdamW(params, lr=0.01, offload=tidegate.Offload(stride=2.0, subgroup_numel=200)) as optimizer:
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                ddp(torch.randn(4, 20)).square().mean().backward()
                grads = [None if param.grad is None else param.grad.clone() for param in params]
                optimizer.step()
                plain.step(grads)
                assert plain.same_weights(params)

        with tidegate.overlap_ddp(optimizer, ddp) as overlap:
            train(3)
            assert optimizer.gradient_source.collectives
        assert not optimizer.gradient_source.collectives
        train(3)
        overlap.close()
        tidegate.overlap_ddp(optimizer, ddp)
        train(3)
    overlap.close()
