"""Fine-tune a language model on questions and answers with the SFTTrainer of TRL.

python trl_sft.py --model Qwen/Qwen3-0.6B --data chats.jsonl
python trl_sft.py            # without them: a tiny model with random weights, and sums
python trl_sft.py --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tidegate
import torch
from datasets import Dataset, load_dataset
from tidegate.agent.integrations.huggingface import TidegateCallback
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def sums(count: int) -> Dataset:
    """Conversations that ask for a sum and get it."""
    pairs = [(7 * number % 50, 11 * number % 40) for number in range(count)]
    chats = [
        [
            {"role": "user", "content": f"What is {one} + {other}?"},
            {"role": "assistant", "content": f"{one} + {other} = {one + other}"},
        ]
        for one, other in pairs
    ]
    return Dataset.from_dict({"messages": chats})


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights, and a tokenizer whose tokens are bytes."""
    special = ["<end>", "<user>", "<assistant>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<end>", pad_token="<end>", additional_special_tokens=special[1:]
    )
    tokenizer.chat_template = CHAT
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trl-sft"), help="checkpoints go here")
    parser.add_argument("--model", help="name or folder of a model; default: a tiny one")
    parser.add_argument("--data", help='JSON lines with "messages"; default: sums')
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    args = parser.parse_args()

    set_seed(0)
    if args.model is not None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = tiny()
    data = load_dataset("json", data_files=args.data, split="train") if args.data is not None else sums(400)
    parts = data.train_test_split(test_size=0.1, seed=0)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            max_length=128,
            assistant_only_loss=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=3,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            bf16=torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        optimizer_cls_and_kwargs=(tidegate.AdamW, {"lr": 3e-3}),
        callbacks=[TidegateCallback(run="trl-sft", daemon=args.daemon)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
