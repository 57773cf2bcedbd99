"""Fine-tune a language model with the Hugging Face Trainer and LoRA adapters of PEFT.

python trainer_lora.py --model meta-llama/Llama-3.2-1B --text FILE
python trainer_lora.py            # without --model: a tiny Llama with random weights, which reads bytes
python trainer_lora.py --resume
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import tidegate
import torch
from peft import LoraConfig, get_peft_model
from tidegate.agent.integrations.huggingface import TidegateCallback
from torch.utils.data import Dataset, random_split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

WINDOW = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) // WINDOW

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * WINDOW : (index + 1) * WINDOW]
        return {"input_ids": window, "labels": window}


def load(name: str | None, text: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model, and the text in its tokens."""
    if name is not None:
        tokens = AutoTokenizer.from_pretrained(name)(text.read_text(), return_tensors="pt")["input_ids"][0]
        return AutoModelForCausalLM.from_pretrained(name), tokens
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainer-lora"), help="checkpoints and adapters go here")
    parser.add_argument("--model", help="name or folder of a model; default: a tiny one")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"], "argparse.py"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    args = parser.parse_args()

    set_seed(0)
    base, tokens = load(args.model, args.text)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.05, target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"],
    )  # fmt: skip
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    windows = Windows(tokens)
    train, evaluation = random_split(windows, [0.9, 0.1], torch.Generator().manual_seed(0))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            bf16=torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=train,
        eval_dataset=evaluation,
        optimizer_cls_and_kwargs=(tidegate.AdamW, {"lr": 5e-3}),
        callbacks=[TidegateCallback(run="trainer-lora", daemon=args.daemon)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(args.out / "adapters"))


if __name__ == "__main__":
    main()
