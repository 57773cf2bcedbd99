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
from tests.agent.engine.test_exactness import FAST
from tests.agent.integrations.test_huggingface import Tokens, language_model
from tests.documented import DAEMON, blocks, replaced
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
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Block"],
    )  # fmt: skip
    return divide_on_cpu(Accelerator(cpu=True), plugin)


def divide_on_cpu(made: Accelerator, plugin: FullyShardedDataParallelPlugin) -> Accelerator:
    """What `Accelerator(fsdp_plugin=plugin)` is on GPUs. On a CPU it takes no plugin; all that it does with one works
    there, too."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    return made


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


def train_as_documented(ours: bool) -> list[torch.Tensor]:
    """docs/frameworks.md's program and its block for FSDP2, but for the class that takes a plugin on GPUs only."""
    program, of_fsdp2 = blocks("frameworks", "Accelerate")
    program = replaced(program, DAEMON, "daemon=None")
    if not ours:
        for line, by in (
            ("tidegate.AdamW(", "torch.optim.AdamW("),
            (', offload=tidegate.Offload(stride="auto"))', ")"),
            ('tidegate.attach(optimizer, model, run="llama-7b", daemon=None)', ""),
            ("optimizer.optimizer.close()", ""),
        ):
            program = replaced(program, line, by)
    of_fsdp2 = replaced(of_fsdp2, "Accelerator(fsdp_plugin=plugin)", "divide_on_cpu(Accelerator(cpu=True), plugin)")
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(16)), batch_size=2)
    given: dict[str, Any] = {
        "model": language_model(), "batches": data, "torch": torch, "divide_on_cpu": divide_on_cpu
    }  # fmt: skip
    exec(of_fsdp2, given)
    exec(replaced(program, "accelerator = Accelerator()\n", ""), given)
    assert all(hasattr(param, "full_tensor") for param in given["model"].parameters()), "not divided by FSDP2"
    if ours:
        assert given["optimizer"].optimizer.num_steps == 4
    return whole(given["model"])


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "documented":
        theirs, ours = train_as_documented(ours=False), train_as_documented(ours=True)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        end(folder, kind)
        return
    theirs, ours = train(kind, ours=False), train(kind, ours=True)
    resumed = train(kind, ours=True, folder=folder / "saved")
    for index, (mine, other, again) in enumerate(zip(ours, theirs, resumed, strict=True)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6, msg=lambda m, i=index: f"parameter {i}: {m}")
        torch.testing.assert_close(again, other, rtol=0, atol=1e-6, msg=lambda m, i=index: f"resumed, {i}: {m}")
    end(folder, kind)


def end(folder: Path, kind: str) -> None:
    (folder / f"{kind}-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
