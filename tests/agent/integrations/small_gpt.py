"""A training script as nanoGPT has it, for test_small_gpt: only its line that builds the optimizer names Tidegate.

`python -m tests.agent.integrations.small_gpt FOLDER LAST_ITERATION` goes on from the checkpoint in the folder, if
there is one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import tidegate

BATCH, MICRO_BATCHES = 4, 2
LEARNING_RATE, LEAST_RATE, WARMUP, DECAY = 1e-2, 1e-3, 3, 20
WEIGHT_DECAY, BETAS, GRAD_CLIP = 1e-1, (0.9, 0.95), 0.5

Build = Callable[..., torch.optim.Optimizer]
Wrap = Callable[[torch.nn.Module], Any]


@dataclass
class Config:
    block_size: int = 16
    vocab_size: int = 32
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 24
    bias: bool = False


class Norm(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(config.n_embd))
        self.bias = torch.nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.n_embd
        self.heads = config.n_head
        self.ln_1, self.ln_2 = Norm(config), Norm(config)
        self.c_attn = torch.nn.Linear(width, 3 * width, bias=config.bias)
        self.attn_proj = torch.nn.Linear(width, width, bias=config.bias)
        self.c_fc = torch.nn.Linear(width, 4 * width, bias=config.bias)
        self.c_proj = torch.nn.Linear(4 * width, width, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(torch.nn.Module):
    """Token embedding and head are one weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = torch.nn.Embedding(config.block_size, config.n_embd)
        self.blocks = torch.nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = Norm(config)
        self.lm_head = torch.nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for param in self.parameters():
            if param.dim() >= 2:
                torch.nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, build: Build) -> torch.optim.Optimizer:
        """Weights that are multiplied decay; biases and norms do not."""
        params = {name: param for name, param in self.named_parameters() if param.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return build(groups, lr=LEARNING_RATE, betas=BETAS)


def get_batch(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a text that counts, with mistakes."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(config.vocab_size, (BATCH, 1), generator=draw)
    text = (starts + torch.arange(config.block_size + 1)) % config.vocab_size
    wrong = torch.rand(text.shape, generator=draw) < 0.1
    text[wrong] = torch.randint(config.vocab_size, text.shape, generator=draw)[wrong]
    return text[:, :-1], text[:, 1:]


def get_lr(iteration: int) -> float:
    if iteration < WARMUP:
        return LEARNING_RATE * (iteration + 1) / (WARMUP + 1)
    share = (iteration - WARMUP) / (DECAY - WARMUP)
    return LEAST_RATE + 0.5 * (1.0 + math.cos(math.pi * share)) * (LEARNING_RATE - LEAST_RATE)


def train(build: Build, folder: Path, last: int, wrap: Wrap = lambda model: model, seed: int = 0) -> dict[str, Any]:
    """Until iteration `last`; gives what it saves: losses since the start, model and optimizer.

    wrap: what the model is called through: compiled, or DDP. seed: of the first batch.
    """
    saved = folder / "ckpt.pt"
    found = torch.load(saved) if saved.exists() else None
    torch.manual_seed(1337)
    model = GPT(Config(**found["model_args"]) if found else Config())
    if found:
        model.load_state_dict(found["model"])
    optimizer = model.configure_optimizers(build)
    if found:
        optimizer.load_state_dict(found["optimizer"])
    called = wrap(model)
    losses: list[float] = found["losses"] if found else []
    iteration = found["iter_num"] if found else 0
    found = None  # free up memory
    while iteration < last:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration)
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            loss = called(*get_batch(model.config, seed + MICRO_BATCHES * iteration + micro_batch)) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        iteration += 1
    made = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": asdict(model.config),
        "iter_num": iteration, "losses": losses,
    }  # fmt: skip
    torch.save(made, saved)
    return made


def offloaded(groups: Any, **settings: Any) -> torch.optim.Optimizer:
    """The one line that a user changes."""
    return tidegate.AdamW(groups, **settings, offload=tidegate.Offload(stride=2.0, subgroup_numel=2000, cpu_threads=1))


if __name__ == "__main__":
    train(offloaded, Path(sys.argv[1]), int(sys.argv[2]))
