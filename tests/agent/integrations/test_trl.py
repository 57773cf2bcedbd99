"""TRL's DPOTrainer, for real: it takes a finished optimizer. The SFTTrainer is one of the examples."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

import tidegate
from tests.services import ROOT
from tidegate.agent.integrations.huggingface import TidegateCallback


def trained(folder: Path, lora: bool, ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after a few steps."""
    set_seed(0)
    model, tokenizer = runpy.run_path(str(ROOT / "examples" / "plain" / "trl_sft.py"))["tiny"]()
    reference = None if lora else copy.deepcopy(model)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = tidegate.AdamW(params, lr=1e-3) if ours else torch.optim.AdamW(params, lr=1e-3)
    rows = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n + 2}"} for n in range(64)]
    settings = DPOConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=lora,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, optimizers=(optimizer, None),
        callbacks=[TidegateCallback(run="dpo")] if ours else [],
    )  # fmt: skip
    trainer.train()
    if isinstance(optimizer, tidegate.AdamW):
        assert optimizer.num_steps == 4
        optimizer.close()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_it_trains_as_with_torchs_adamw(tmp_path: Path, lora: bool) -> None:
    ours, theirs = (trained(tmp_path, lora, kind) for kind in (True, False))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    for name, weight in ours[1].items():
        torch.testing.assert_close(weight, theirs[1][name], rtol=0, atol=1e-5)
