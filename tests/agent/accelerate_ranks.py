"""One rank of a real torchrun job, for test_accelerate: Accelerate's FSDP2 with `tidegate.AdamW` beside torch's.

The optimizer is built from the whole model, as Accelerate's documentation has it; `prepare` puts shards in its place.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tidegate
from tests.agent.test_exactness import FAST
from tidegate.agent.integrations.huggingface import unwrapped

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, set_seed

STEPS = 6


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(16, 33), torch.nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def network() -> torch.nn.Module:
    set_seed(0)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(16, 3))


def accelerator(kind: str) -> Accelerator:
    if kind == "ddp":
        return Accelerator(cpu=True)
    made = Accelerator(cpu=True)
    divide_on_cpu(made, "Block")
    return made


def divide_on_cpu(made: Accelerator, layer: str) -> None:
    """Accelerate takes the plugin of FSDP2 on GPUs only; all that it does with it works on the CPU, too."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[layer],
    )  # fmt: skip
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [p.detach() for p in model.parameters()]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in tensors]


def train(kind: str, ours: bool, folder: Path | None = None) -> list[torch.Tensor]:
    """With a checkpoint of Accelerate's in the middle, from which the second half of a new run goes on."""
    runs = accelerator(kind)

    def prepared() -> tuple[Any, Any, Any]:
        model = network()
        if ours:
            offload = tidegate.Offload(stride=2.0, subgroup_numel=200, emulated=FAST, cpu_threads=1)
            optimizer: Any = tidegate.AdamW(model.parameters(), lr=1e-2, offload=offload)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=4)
        return runs.prepare(model, optimizer, schedule)

    model, optimizer, schedule = prepared()
    assert kind == "ddp" or all(hasattr(param, "full_tensor") for param in model.parameters()), "not divided by FSDP2"
    if ours:
        tidegate.attach(optimizer, model, run=f"accelerate-{kind}")
    for step in range(STEPS):
        if step == STEPS // 2 and folder is not None:
            runs.save_state(str(folder))
            if ours:
                unwrapped(optimizer).close()
            runs = restarted(kind)
            model, optimizer, schedule = prepared()
            runs.load_state(str(folder))
        optimizer.zero_grad()
        runs.backward(model(batch(step)).square().mean())
        runs.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    found = whole(model)
    if ours:
        changed = [not torch.equal(a, b) for a, b in zip(found, whole(network()), strict=True)]
        assert all(changed), f"{changed.count(False)} of {len(changed)} parameters were not trained"
        unwrapped(optimizer).close()
    return found


def restarted(kind: str) -> Accelerator:
    """As after a restart: nothing that was prepared before is known."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return accelerator(kind)


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    theirs, ours = train(kind, ours=False), train(kind, ours=True)
    resumed = train(kind, ours=True, folder=folder / "saved")
    for index, (mine, other, again) in enumerate(zip(ours, theirs, resumed, strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda m, i=index: f"parameter {i}: {m}")
        torch.testing.assert_close(again, other, rtol=1e-5, atol=1e-6, msg=lambda m, i=index: f"resumed, {i}: {m}")
    (folder / f"{kind}-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
