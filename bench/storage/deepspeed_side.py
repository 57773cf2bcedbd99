"""The same training with DeepSpeed ZeRO-3, its optimizer state on a disk (`offload_optimizer: nvme`)."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from storage.side import Model

BUFFERS = 12
"""The least with which reads and writes are pipelined: four arrays of the subgroup before, of this and of the next."""


class DeepSpeed:
    """Subgroups of one layer. `block_bytes`, `depth`: of its asynchronous I/O."""

    def __init__(
        self, *, model: Model, directory: str, block_bytes: int, depth: int, threads: int, max_grad_norm: float = 1.0
    ) -> None:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(_free_port())
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        logging.disable(logging.WARNING)
        import deepspeed

        torch.manual_seed(0)
        torch.set_num_threads(threads)
        linear = [torch.nn.Linear(model.width, model.width, bias=False) for _ in range(model.layers)]
        net = torch.nn.Sequential(*linear)
        self._x = torch.randn(model.batch, model.width)
        subgroup = model.width**2
        config = {
            "train_micro_batch_size_per_gpu": model.batch,
            "gradient_clipping": max_grad_norm,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": subgroup,
                "reduce_bucket_size": subgroup,
                "stage3_prefetch_bucket_size": subgroup,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 1 << 40,
                "stage3_max_reuse_distance": 1 << 40,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": directory,
                    "buffer_count": BUFFERS,
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
            },
            "aio": {"block_size": block_bytes, "queue_depth": depth, "single_submit": False, "overlap_events": True},
        }
        self._engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        self._directory = Path(directory)

    def forward(self) -> None:
        self._loss = self._engine(self._x).float().pow(2).mean()

    def backward(self) -> None:
        self._engine.backward(self._loss)

    def update(self) -> None:
        self._engine.step()

    def told(self, backward_began: float) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        # Its files go with the folder; its own shutdown waits for collectives.
        os._exit(0)


def buffer_bytes(model: Model) -> int:
    """Host memory of its staging buffers: fp32 arrays of one subgroup."""
    return BUFFERS * 4 * model.width**2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
