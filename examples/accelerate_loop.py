"""Train a small language model in a loop of your own with Accelerate.

accelerate launch accelerate_loop.py --text FILE
accelerate launch accelerate_loop.py --resume
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import tidegate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

WINDOW = 64


def batches_of(text: Path, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Windows of the text, byte by byte: to train, and the last tenth to evaluate."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    split = len(windows) * 9 // 10
    train, evaluation = TensorDataset(windows[:split]), TensorDataset(windows[split:])
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(evaluation, batch_size)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader) -> float:
    model.eval()
    losses = [
        accelerator.gather_for_metrics(model(input_ids=tokens, labels=tokens).loss.repeat(len(tokens)))
        for (tokens,) in batches
    ]
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("accelerate-loop"), help="the state goes here")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"], "argparse.py"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stop-at", type=int, help="end at this step of the schedule (default: at the last)")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        step_scheduler_with_optimizer=False,
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = tidegate.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, max_grad_norm=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=args.steps)
    train, evaluation = batches_of(args.text, batch_size=8)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
    tidegate.attach(optimizer, model, run="accelerate-loop", daemon=args.daemon)
    done = 0
    if args.resume:
        accelerator.load_state(str(args.out))
        done = int((args.out / "steps").read_text())

    skipped = accelerator.skip_first_batches(train, done * accelerator.gradient_accumulation_steps)
    last, total = args.stop_at or args.steps, 0.0
    for (tokens,) in skipped:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            total += loss.item() / accelerator.gradient_accumulation_steps
            optimizer.optimizer.log(loss=loss.item(), tokens=tokens.numel())
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        schedule.step()
        done += 1
        accelerator.print(f"step {done}: loss {total:.4f}, lr {schedule.get_last_lr()[0]:.2e}")
        total = 0.0
        if done == last:
            break
    accelerator.print(f"evaluation loss {evaluate(accelerator, model, evaluation):.4f}")
    accelerator.save_state(str(args.out))
    if accelerator.is_main_process:
        (args.out / "steps").write_text(str(done))
    accelerator.end_training()


if __name__ == "__main__":
    main()
