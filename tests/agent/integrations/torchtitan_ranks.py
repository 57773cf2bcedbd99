"""One rank of a real torchrun job, for test_torchtitan: our optimizer in torchtitan's container beside torch's.

`package` is the container of the documentation, with torchtitan's own scheduler and clipping. `calls` is a container
that calls of torch what that of torchtitan 0.2 calls. In both FSDP2 divides the parameters, and states go through
torch's distributed checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tidegate
from tests.agent.integrations.fsdp_ranks import backward, divided, whole
from tests.documented import program

HALF = 4
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OFFLOAD = tidegate.Offload(device="emulated", stride=2.0, subgroup_numel=64, cpu_threads=1)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

Clip = Callable[[Any, float], Any]
Build = Callable[[bool, torch.nn.Module], tuple[Any, Any]]
"""Container and scheduler, of ours or of torch's AdamW."""


class Calls:
    """As torchtitan 0.2 has it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, [optimizer]

    def step(self) -> None:
        self.optimizers[0].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizers[0].zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizers[0], options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizers[0], optim_state_dict=state, options=FLAT)


def of_calls() -> tuple[Build, Clip]:
    def build(ours: bool, model: torch.nn.Module) -> tuple[Any, Any]:
        kind: Any = functools.partial(tidegate.AdamW, offload=OFFLOAD) if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), **ADAMW)
        return Calls(model, optimizer), torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)

    return build, torch.nn.utils.clip_grad_norm_


def of_package() -> tuple[Build, Clip]:
    from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
    from torchtitan.distributed.utils import clip_grad_norm_

    recipe: dict[str, Any] = {}
    numbers = itertools.count()
    exec(program("frameworks", "torchtitan"), recipe)

    def build(ours: bool, model: torch.nn.Module) -> tuple[Any, Any]:
        name = "TidegateAdamW" if ours else "AdamW"
        groups = [
            ParamGroupConfig(pattern=r"bias$", optimizer_name=name, optimizer_kwargs={**ADAMW, "weight_decay": 0.0}),
            ParamGroupConfig(pattern=r".*", optimizer_name=name, optimizer_kwargs=ADAMW),
        ]
        if ours:
            given = {"TidegateAdamW": {"offload": OFFLOAD}}
            config = dataclasses.replace(
                recipe["optimizer"],
                run=f"titan-{next(numbers)}",
                param_groups=groups,
                optimizer_factory_kwargs_by_name=given,
            )
        else:
            config = recipe["OptimizersContainer"].Config(param_groups=groups, implementation="for-loop")
        optimizers = config.build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        return optimizers, schedule.build(optimizers=optimizers, training_steps=3 * HALF)

    return build, clip_grad_norm_


class Run:
    """A model, as torchtitan trains it."""

    def __init__(self, parts: tuple[Build, Clip], ours: bool, mesh: DeviceMesh) -> None:
        build, self._clip = parts
        self.ours, self.model = ours, divided(mesh)
        self.optimizers, self.schedule = build(ours, self.model)
        self.step = 0

    def train(self) -> Run:
        for _ in range(HALF):
            self.optimizers.zero_grad(set_to_none=self.step % 2 == 0)
            backward(self.model, self.step)
            self._clip(self.model.parameters(), 0.1)
            self.optimizers.step()
            self.schedule.step()
            self.step += 1
        return self

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "lr_scheduler": self.schedule}

    def save(self, folder: Path) -> None:
        dcp.save(self.states(), checkpoint_id=folder)

    def load(self, folder: Path) -> Run:
        dcp.load(self.states(), checkpoint_id=folder)
        self.step = HALF
        return self

    def weights(self) -> list[torch.Tensor]:
        return whole(self.model.parameters())

    def end(self) -> None:
        if self.ours:
            self.optimizers.optimizers[0].close()


def main(folder: Path, kind: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = of_package() if kind == "package" else of_calls()
    theirs, mine = Run(parts, False, mesh), Run(parts, True, mesh)
    for run in (theirs, mine):
        run.train().save(folder / f"saved-{run.ours}")
        run.train()
    # Each goes on from its own checkpoint and from the other's.
    resumed = [
        Run(parts, ours, mesh).load(folder / f"saved-{saved}").train()
        for ours in (True, False)
        for saved in (True, False)
    ]
    for run in (mine, *resumed):
        for weight, wanted in zip(run.weights(), theirs.weights(), strict=True):
            torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-6)
        if run.ours:
            optimizer = run.optimizers.optimizers[0]
            assert optimizer.num_steps == 2 * HALF
            assert kind == "calls" or optimizer.attachment.recorder.number == 2 * HALF
        run.end()
    (folder / f"{kind}-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
