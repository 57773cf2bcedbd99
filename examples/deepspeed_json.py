"""DeepSpeed ZeRO-3: one line here, one block in ds.json."""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import deepspeed
import tidegate
import torch

WINDOW = 64


def batch(micro_batch: int, step: int, rank: int) -> torch.Tensor:
    """Windows of a module of the standard library, byte by byte."""
    text = torch.frombuffer(
        bytearray(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()), dtype=torch.uint8
    )
    starts = torch.randint(
        0, len(text) - WINDOW, (micro_batch,), generator=torch.Generator().manual_seed(100 * step + rank)
    )
    return torch.stack([text[start : start + WINDOW].long() for start in starts.tolist()])


class Bytes(torch.nn.Module):
    """Guesses the next byte from the one before; returns the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.GELU())
            for _ in range(4)
        )
        self.head = torch.nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text[:, :-1])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("deepspeed-json"), help="paths and checkpoints are here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    options = parser.parse_args()

    config = json.loads(Path(__file__).with_name("ds.json").read_text())
    for name in ("nvme", "pfs"):
        (options.folder / name).mkdir(parents=True, exist_ok=True)
        config["tidegate"]["paths"][name] = str(options.folder / name)
    if options.daemon:
        config["tidegate"]["daemon"] = options.daemon

    tidegate.enable_deepspeed()
    torch.manual_seed(0)
    model = Bytes()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if (options.folder / "latest").exists():
        engine.load_checkpoint(str(options.folder))
    first = engine.global_steps
    while engine.global_steps < first + options.steps:
        loss = engine(batch(engine.train_micro_batch_size_per_gpu(), engine.micro_steps, engine.global_rank))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(options.folder), tag=f"step-{engine.global_steps}")
    if engine.global_rank == 0:
        split = engine.optimizer.tidegate.effective_knobs()["tier_split"]
        print(f"steps {first} to {engine.global_steps}, loss {loss.item():.4f}, subgroups on paths: {split}")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
