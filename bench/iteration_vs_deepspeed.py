"""Claim: an iteration of DeepSpeed ZeRO-3 is faster with Tidegate in it than with DeepSpeed's own offload, to host
memory and to NVMe.

Four processes train the same fp32 model with DeepSpeed on its CPU accelerator, in interleaved rounds: its own
`offload_optimizer` `cpu` and `nvme` (pipelined both ways), and both with a `"tidegate"` block. With storage both get
the same host memory beside weights and gradients: DeepSpeed's 12 buffers, the least with which it pipelines.

`update_ratio_nvme`: DeepSpeed's `engine.step()` by ours. `iteration_ratio_nvme`, `iteration_ratio_cpu`: forward,
backward and step. Above 1 is faster. The device is emulated, unpaced: its copies are copies in host memory, which
DeepSpeed does not need there. Nothing is claimed about a GPU; on one, `stock with asynchronous gradient copies only`
has to be compared with, too, which is not done here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from storage.deepspeed_side import BUFFERS, buffer_bytes
from storage.figures import cpu_name, ratios, spread
from storage.side import Model, Side

WARM_UP = 2
IO_THREADS = 4
BLOCK_BYTES = 1 << 20
UNPACED = {"h2d_bytes_per_second": 1e15, "d2h_bytes_per_second": 1e15, "update_params_per_second": 1e15}
SLOT_BYTES = 12
"""For each parameter in a host slot or in the cache: fp32 weight and moments."""


class ZeRO3:
    """DeepSpeed with its own offload, or with `block` as its `"tidegate"` block. Subgroups of one layer."""

    def __init__(self, *, model: Model, offload: dict[str, Any], block: dict[str, Any] | None, threads: int) -> None:
        os.environ |= {"OMP_NUM_THREADS": str(threads)}
        import torch

        logging.disable(logging.WARNING)
        import deepspeed

        import tidegate

        torch.manual_seed(0)
        torch.set_num_threads(threads)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        tidegate.enable_deepspeed()
        layers = [torch.nn.Linear(model.width, model.width, bias=False) for _ in range(model.layers)]
        net = torch.nn.Sequential(*layers)
        self._x = torch.randn(model.batch, model.width)
        subgroup = model.width**2
        config = {
            "train_micro_batch_size_per_gpu": model.batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": subgroup,
                "reduce_bucket_size": subgroup,
                "stage3_prefetch_bucket_size": subgroup,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 1 << 40,
                "stage3_max_reuse_distance": 1 << 40,
                "offload_optimizer": offload,
            },
            "aio": {
                "block_size": BLOCK_BYTES,
                "queue_depth": 2 * IO_THREADS,
                "single_submit": False,
                "overlap_events": True,
            },
            **({"tidegate": block} if block is not None else {}),
        }
        self._engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)

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


def sides(folder: Path, model: Model, threads: int) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """DeepSpeed's offload settings and our block, by side."""
    for name in ("stock", "ours"):
        (folder / name).mkdir()
    pipelined = {"buffer_count": BUFFERS, "pipeline_read": True, "pipeline_write": True}
    subgroup = model.width**2 // 2
    cache = max(0, buffer_bytes(model) - 3 * subgroup * SLOT_BYTES)
    block = {"stride": "off", "cpu_threads": threads, "subgroup_numel": subgroup, "emulated": UNPACED}
    path = {"directory": str(folder / "ours"), "threads": IO_THREADS, "block_bytes": BLOCK_BYTES}
    tiered = {**block, "paths": {"disk": path}, "host_cache": cache * 8 // SLOT_BYTES, "gradients": "release"}
    return {
        "stock_cpu": ({"device": "cpu"}, None),
        "tidegate_cpu": ({"device": "cpu"}, block),
        "stock_nvme": ({"device": "nvme", "nvme_path": str(folder / "stock"), **pipelined}, None),
        "tidegate_nvme": ({"device": "cpu"}, tiered),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    model = Model(layers=options.layers, width=options.width)
    rounds: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(Side(ZeRO3, model=model, offload=offload, block=block, threads=options.threads))
            for name, (offload, block) in sides(folder, model, options.threads).items()
        }
        for side in running.values():
            for _ in range(WARM_UP):
                side.step()
        end, names = time.monotonic() + options.seconds, list(running)
        while len(rounds.get(names[0], ())) < options.rounds and (len(rounds) == 0 or time.monotonic() < end):
            random.Random(len(rounds)).shuffle(names)
            for name in names:
                rounds.setdefault(name, []).append(running[name].step())
    return rounds


def result(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    def ratio(tier: str, key: str) -> dict[str, float]:
        stock, ours = ([float(one[key]) for one in rounds[f"{who}_{tier}"]] for who in ("stock", "tidegate"))
        return spread(ratios(stock, ours), 3)

    spreads = {
        "update_ratio_nvme": ratio("nvme", "update"),
        "iteration_ratio_nvme": ratio("nvme", "iteration"),
        "update_ratio_cpu": ratio("cpu", "update"),
        "iteration_ratio_cpu": ratio("cpu", "iteration"),
    }
    return {
        **{name: figures["median"] for name, figures in spreads.items()},
        "spread": spreads,
        "seconds": {
            side: {key: spread([float(one[key]) for one in steps]) for key in ("backward", "update", "iteration")}
            for side, steps in rounds.items()
        },
        "bytes_per_param": {
            side: round((steps[-1]["read_bytes"] + steps[-1]["written_bytes"]) / options.layers / options.width**2, 2)
            for side, steps in rounds.items()
        },
        "rounds": len(rounds["stock_cpu"]),
        "parameters": options.layers * options.width**2,
        "load_at_end": round(os.getloadavg()[0], 1),
        "device": "emulated, unpaced",
        "cpu": cpu_name(),
        "cores": options.threads,
        "kernel": platform.release(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "tidegate")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure; a folder in it is used")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048, help="a layer has width² parameters")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round after this long")
    parser.add_argument("--json", action="store_true", help="print nothing but the result, which is all there is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="iteration-", dir=options.directory) as folder:
        print(json.dumps(result(measure(Path(folder).resolve(), options), options)))


if __name__ == "__main__":
    main()
