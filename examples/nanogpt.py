"""Train a small GPT on the bytes of a text, as nanoGPT does; under torchrun with DDP.

python nanogpt.py --text FILE
torchrun --nproc-per-node 2 nanogpt.py --text FILE
python nanogpt.py --resume
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tidegate
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE, MICRO_BATCHES = 8, 4  # of all ranks together: MICRO_BATCHES are divided among them
LEARNING_RATE, MIN_LR, WARMUP_ITERS = 3e-3, 3e-4, 10
WEIGHT_DECAY, BETAS, GRAD_CLIP = 0.1, (0.9, 0.95), 1.0


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 96


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.attn_proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied
        for name, param in self.named_parameters():
            if param.dim() >= 2:
                scale = math.sqrt(2 * config.n_layer) if name.endswith(("attn_proj.weight", "mlp.2.weight")) else 1
                nn.init.normal_(param, std=0.02 / scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())

    def param_groups(self) -> list[dict[str, object]]:
        """Weights that are multiplied decay; biases and norms do not."""
        params = [param for param in self.parameters() if param.requires_grad]
        return [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]


def prepare(text: Path, out: Path) -> None:
    """Writes train.bin and val.bin: one number for each byte of the text, the last tenth of them for validation."""
    tokens = np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.uint16)
    split = len(tokens) * 9 // 10
    tokens[:split].tofile(out / "train.bin")
    tokens[split:].tofile(out / "val.bin")


def get_batch(file: Path, config: GPTConfig, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(file, dtype=np.uint16, mode="r")  # a new one for each batch: it would leak otherwise
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - config.block_size - 1, (BATCH_SIZE,), generator=draw)
    windows = [torch.from_numpy(data[start : start + config.block_size + 1].astype(np.int64)) for start in starts]
    tokens = torch.stack(windows).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def get_lr(iteration: int, last: int) -> float:
    """Linear warm-up, then a cosine down to MIN_LR."""
    if iteration < WARMUP_ITERS:
        return LEARNING_RATE * (iteration + 1) / (WARMUP_ITERS + 1)
    share = min(1.0, (iteration - WARMUP_ITERS) / max(1, last - WARMUP_ITERS))
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * share)) * (LEARNING_RATE - MIN_LR)


@torch.no_grad()
def estimate_loss(model: nn.Module, out: Path, config: GPTConfig, device: torch.device) -> dict[str, float]:
    model.eval()
    losses = {
        split: sum(model(*get_batch(out / f"{split}.bin", config, seed, device)).item() for seed in range(8)) / 8
        for split in ("train", "val")
    }
    model.train()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("nanogpt"), help="data and checkpoint go here")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"], "argparse.py"))
    parser.add_argument("--iters", type=int, default=60, help="iterations, those before a resume included")
    parser.add_argument("--stop-at", type=int, help="end at this iteration of the schedule (default: at the last)")
    parser.add_argument("--eval-interval", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    parser.add_argument("--bind", default="127.0.0.1", help="address of /metrics")
    parser.add_argument("--port", type=int, default=0, help="port of /metrics; 0: a free one")
    args = parser.parse_args()

    ddp = "RANK" in os.environ  # set by torchrun
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ddp:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
    master, micro_batches = rank == 0, MICRO_BATCHES // ranks
    autocast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    if master:
        args.out.mkdir(parents=True, exist_ok=True)
        prepare(args.text, args.out)
    if ddp:
        dist.barrier()
    torch.manual_seed(1337)
    found = torch.load(args.out / "ckpt.pt", map_location=device) if args.resume else None
    config = GPTConfig(**found["model_args"]) if found else GPTConfig()
    raw_model = GPT(config).to(device)
    optimizer = tidegate.AdamW(raw_model.param_groups(), lr=LEARNING_RATE, betas=BETAS, max_grad_norm=GRAD_CLIP)
    first, best_val_loss = 0, math.inf
    if found:
        raw_model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first, best_val_loss = found["iter_num"], found["best_val_loss"]
        found = None  # free its memory
    model = DistributedDataParallel(raw_model) if ddp else raw_model
    tidegate.attach(optimizer, model, run="nanogpt", daemon=args.daemon, metrics_bind=args.bind, metrics_port=args.port)

    last = args.stop_at or args.iters
    began = time.monotonic()
    for iteration in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration, args.iters)
        total = torch.zeros((), device=device)
        for micro in range(micro_batches):
            if ddp:
                model.require_backward_grad_sync = micro == micro_batches - 1
            seed = (iteration * micro_batches + micro) * ranks + rank
            with autocast:
                loss = model(*get_batch(args.out / "train.bin", config, seed, device)) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.log(loss=total.item(), tokens=micro_batches * BATCH_SIZE * config.block_size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if master and (iteration + 1) % 10 == 0:
            took, began = time.monotonic() - began, time.monotonic()
            print(f"iter {iteration + 1}: loss {total.item():.4f}, {took * 100:.0f} ms", flush=True)
        if master and ((iteration + 1) % args.eval_interval == 0 or iteration + 1 == last):
            losses = estimate_loss(raw_model, args.out, config, device)
            best_val_loss = min(best_val_loss, losses["val"])
            print(f"step {iteration + 1}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
            checkpoint = {
                "model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": asdict(config),
                "iter_num": iteration + 1, "best_val_loss": best_val_loss,
            }  # fmt: skip
            torch.save(checkpoint, args.out / "ckpt.new")
            (args.out / "ckpt.new").replace(args.out / "ckpt.pt")  # complete also if the job ends while it saves
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
