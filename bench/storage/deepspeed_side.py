"""A training with DeepSpeed ZeRO-3, with DeepSpeed's own optimizer offload or with Tidegate. Its model is the same as
that of the training without DeepSpeed in `storage/ours.py`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from storage.asynchronous import AsynchronousGradients
from storage.side import Model

BUFFERS = 12
"""Fewest buffers with which DeepSpeed pipelines reads and writes: four arrays for each of the previous, the present and
the next subgroup."""


class DeepSpeed:
    """A training of linear layers with DeepSpeed ZeRO-3 in this process. Each layer is a subgroup."""

    def __init__(
        self, *, model: Model, offload: Mapping[str, Any], threads: int, block: Mapping[str, Any] | None = None,
        block_bytes: int = 1 << 20, depth: int = 8, max_grad_norm: float = 1.0, device: str = "cpu",
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        """offload: DeepSpeed's `offload_optimizer`. block: the `"tidegate"` block; None for DeepSpeed's own offload.

        block_bytes, depth: block size and queue depth of DeepSpeed's asynchronous I/O. device: "cpu" or "cuda".
        asynchronous: DeepSpeed's own offload with asynchronous copies of gradients (`AsynchronousGradients`).
        """
        os.environ |= {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": str(threads)}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        import torch

        logging.disable(logging.WARNING)
        import deepspeed

        torch.manual_seed(0)
        torch.set_num_threads(threads)
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        if block is not None:
            import tidegate

            tidegate.enable_deepspeed()
        linear = [torch.nn.Linear(model.width, model.width, bias=False) for _ in range(model.layers)]
        net = torch.nn.Sequential(*linear)
        dtype = getattr(torch, model.dtype)
        self._x = torch.randn(model.batch, model.width, device=device, dtype=dtype)
        subgroup = model.width**2
        config = {
            "train_micro_batch_size_per_gpu": model.batch,
            "gradient_clipping": max_grad_norm,
            "bf16": {"enabled": dtype is torch.bfloat16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": subgroup,
                "reduce_bucket_size": subgroup,
                "stage3_prefetch_bucket_size": subgroup,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 1 << 40,
                "stage3_max_reuse_distance": 1 << 40,
                "offload_optimizer": dict(offload),
            },
            "aio": {"block_size": block_bytes, "queue_depth": depth, "single_submit": False, "overlap_events": True},
            **({"tidegate": dict(block)} if block is not None else {}),
        }
        self.engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        if asynchronous:
            AsynchronousGradients(self.engine.optimizer)
        self._finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def forward(self) -> None:
        self._loss = self.engine(self._x).float().pow(2).mean()
        self._finish()

    def backward(self) -> None:
        self.engine.backward(self._loss)
        self._finish()

    def update(self) -> None:
        self.engine.step()
        self._finish()

    def told(self, backward_began: float) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        # Its files go with the folder; its own shutdown waits for collectives.
        os._exit(0)


def on_nvme(directory: str) -> dict[str, Any]:
    """The setting `offload_optimizer` for state in this folder, with reads and writes pipelined with the update."""
    pipelined = {"buffer_count": BUFFERS, "pipeline_read": True, "pipeline_write": True}
    return {"device": "nvme", "nvme_path": directory, **pipelined}


def check_nvme(device: str = "cpu") -> None:
    """Ends the program if DeepSpeed cannot read and write files on this machine. The message names the missing
    package."""
    asked = "import sys; from deepspeed.ops.op_builder import AsyncIOBuilder as A; sys.exit(not A().is_compatible())"
    done = subprocess.run(
        [sys.executable, "-c", asked], env={**os.environ, "DS_ACCELERATOR": device}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"DeepSpeed cannot offload to files here: install libaio-dev. It says: {done.stderr.strip()[-300:]}")


def buffer_bytes(model: Model) -> int:
    """Host memory of DeepSpeed's staging buffers in bytes: fp32 arrays of one subgroup."""
    return BUFFERS * 4 * model.width**2
