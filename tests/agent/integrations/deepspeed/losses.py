"""Losses of free-running training, for test_losses: DeepSpeed's own ZeRO-3 offload with one thread and with
two, and ours. Where sums are split among threads, DeepSpeed differs from itself by roundings, and training lets them
grow; how far it goes apart from itself is the measure of how far ours may.

    python -m tests.agent.integrations.deepspeed.losses [--steps 100] [--seeds 3]        # one JSON object
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "2"}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

import tidegate

VOCABULARY, WIDTH, TOKENS, BATCH = 256, 32, 32, 32
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "fp32, clipped": {"gradient_clipping": 0.5},
    "bf16": {"bf16": {"enabled": True}},
}
BLOCK = {"stride": 2, "static_ratio": 0.25, "subgroup_numel": 6_000, "cpu_threads": 1}


class Language(torch.nn.Module):
    """A small transformer; its embeddings and norms sum over all tokens, which threads divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def losses(
    seed: int, threads: int, block: Mapping[str, Any] | None, steps: int, way: Mapping[str, Any]
) -> torch.Tensor:
    """Of each step, before its update. Sequences in which a token depends on the last one, so that there is something
    to learn."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = Language()
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10_000,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        **way, **({"tidegate": dict(block)} if block is not None else {}),
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert (type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3) == (block is None)
    made, found = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        steps_of_tokens = torch.randint(0, 4, (BATCH, TOKENS + 1), generator=made)
        loss = engine(steps_of_tokens.cumsum(1) * 7 % VOCABULARY)
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return torch.tensor(found, dtype=torch.float64)


def apart(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    difference = (one - other).abs()
    return {"largest": difference.max().item(), "root_mean_square": difference.square().mean().sqrt().item()}


def measured(steps: int, seeds: int, way: Mapping[str, Any]) -> dict[str, Any]:
    """How far DeepSpeed with two threads, and ours, are from DeepSpeed with one, over all seeds."""
    runs = {
        name: torch.stack([losses(seed, threads, block, steps, way) for seed in range(seeds)])
        for name, threads, block in (("one", 1, None), ("two", 2, None), ("ours", 1, BLOCK))
    }
    spread, ours = (apart(runs[name], runs["one"]) for name in ("two", "ours"))
    return {
        "first_loss": runs["one"][:, 0].mean().item(), "last_loss": runs["one"][:, -1].mean().item(),
        "deepspeed_two_threads": spread, "ours": ours,
        "ours_by_deepspeed": {key: ours[key] / spread[key] if spread[key] else None for key in spread},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, action="append")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    tidegate.enable_deepspeed()
    began = time.monotonic()
    found = {name: measured(options.steps, options.seeds, WAYS[name]) for name in options.way or WAYS}
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    print(json.dumps({
        "losses": found, "steps": options.steps, "seeds": options.seeds, "seconds": round(time.monotonic() - began, 1),
        "cpu": cpu.split(":", 1)[1].strip(), "kernel": platform.release(),
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
