"""The Hugging Face Trainer with `deepspeed=` and our one line, for test_deepspeed: 20 steps, and 10 of them resumed."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import tidegate
from tests.agent.integrations.test_huggingface import Tokens, language_model
from tidegate.agent.integrations.deepspeed.stage3 import TidegateZeroOptimizer
from tidegate.agent.integrations.huggingface import TidegateCallback

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 3000},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "tidegate": {"stride": 2, "subgroup_numel": 3000, "cpu_threads": 1},
}  # fmt: skip


def trained(folder: Path, resume: Path | None = None) -> list[torch.Tensor]:
    """This rank's weights after 20 steps."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=5, save_steps=10, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
        warmup_steps=3, lr_scheduler_type="constant_with_warmup", deepspeed=copy.deepcopy(CONFIG),
    )  # fmt: skip
    trainer = Trainer(
        model=language_model(), args=arguments, train_dataset=Tokens(), callbacks=[TidegateCallback(run="trainer")]
    )
    result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert result.global_step == 20
    assert isinstance(trainer.deepspeed.optimizer, TidegateZeroOptimizer)
    assert "the update took" in trainer.state.log_history[-2]["tidegate_verdict"]
    return [param.ds_tensor.clone() for param in trainer.deepspeed.module.parameters()]


def main(folder: Path) -> None:
    tidegate.enable_deepspeed()
    whole = trained(folder / "one")
    resumed = trained(folder / "other", folder / "one" / "checkpoint-10")
    assert all(map(torch.equal, whole, resumed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
