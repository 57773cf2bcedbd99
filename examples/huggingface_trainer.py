"""Hugging Face Trainer: our optimizer and our callback are two arguments."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import tidegate
import torch
from tidegate.agent.integrations.huggingface import TidegateCallback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WINDOW = 64


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of a module of the standard library, byte by byte."""

    def __init__(self) -> None:
        source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
        self._text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._text) // WINDOW

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._text[index * WINDOW : (index + 1) * WINDOW]
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("huggingface-trainer"), help="checkpoints go here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=WINDOW, use_cache=False,
        )
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder), max_steps=options.steps, per_device_train_batch_size=8, logging_steps=5,
            save_steps=10, learning_rate=3e-3, report_to=[], use_cpu=not torch.cuda.is_available(), seed=0,
        ),
        train_dataset=Text(),
        optimizer_cls_and_kwargs=(tidegate.AdamW, {"lr": 3e-3, "offload": tidegate.Offload(subgroup_numel=20_000)}),
        callbacks=[TidegateCallback(run="huggingface-trainer", daemon=options.daemon)],
    )  # fmt: skip
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    print(f"steps {result.global_step}, loss {trainer.state.log_history[-2]['loss']:.4f}")
    print(trainer.state.log_history[-2]["tidegate_verdict"])


if __name__ == "__main__":
    main()
