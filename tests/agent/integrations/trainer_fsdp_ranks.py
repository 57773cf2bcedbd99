"""One rank of a real torchrun job, for test_accelerate: the Trainer with FSDP2, beside its own AdamW."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from transformers import Trainer, TrainingArguments

import tidegate
from tests.agent.integrations.accelerate_ranks import divide_on_cpu, whole
from tests.agent.integrations.test_huggingface import Tokens, language_model
from tidegate.agent.integrations.huggingface import TidegateCallback, unwrapped


class DividingTrainer(Trainer):
    """Its Accelerator divides by FSDP2 as the arguments say, which it does without help on GPUs only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        divide_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True


def train(folder: Path, ours: bool) -> list[torch.Tensor]:
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", optim="adamw_torch", fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    settings: dict[str, Any] = {}
    if ours:
        offload = tidegate.Offload(subgroup_numel=3000, stride=2.0, cpu_threads=1)
        settings = {
            "optimizer_cls_and_kwargs": (tidegate.AdamW, {"lr": 1e-2, "offload": offload}),
            "callbacks": [TidegateCallback(run="trainer-fsdp2")],
        }
    trainer = DividingTrainer(model=language_model(), args=args, train_dataset=Tokens(), **settings)
    trainer.train()
    if ours:
        unwrapped(trainer.optimizer).close()
    assert all(hasattr(param, "full_tensor") for param in trainer.model_wrapped.parameters()), "not divided by FSDP2"
    return whole(trainer.model_wrapped)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ours, theirs = train(folder, ours=True), train(folder, ours=False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    (folder / f"trainer-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
