"""Claim: an iteration of DeepSpeed ZeRO-3 is faster with Tidegate than with DeepSpeed's own offload, to host memory and
to NVMe.

Several processes train the same model with DeepSpeed, in interleaved rounds: with its own `offload_optimizer` for `cpu`
and for `nvme` (pipelined in both directions), and for both with a `"tidegate"` block. With storage, both sides get the
same host memory in addition to weights and gradients: that of DeepSpeed's 12 buffers, the least with which it can
pipeline.

`update_ratio_nvme`: time of DeepSpeed's `engine.step()` divided by Tidegate's. `iteration_ratio_nvme`,
`iteration_ratio_cpu`: the same for forward, backward and step. Above 1: Tidegate is faster.

Without a GPU, DeepSpeed uses its CPU accelerator with fp32, and Tidegate an emulated device without pacing. Copies to
and from the emulated device are copies within host memory, which DeepSpeed does not make there. Such results say
nothing about a GPU.

With CUDA, weights are bf16, and there is one more process: DeepSpeed's own offload to host memory, changed only so that
gradients are copied asynchronously (`storage/asynchronous.py`). `iteration_ratio_cpu_asynchronous` is its iteration
time divided by Tidegate's. It shows the gain that does not come from asynchronous copies. Without CUDA it is null.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from storage.deepspeed_side import DeepSpeed, buffer_bytes, check_nvme, on_nvme
from storage.figures import cpu_name, ratios, spread
from storage.side import Model, Side

from tidegate.plan.slot_sizes import WEIGHT_SLOTS

WARM_UP = 4
"""Rounds before the first measured one. Tidegate defers flushes only after some steps."""
LEAST_ROUNDS = 3
IO_THREADS, HOST_SLOTS = 4, 3
BLOCK_BYTES = 1 << 20
UNPACED = {"h2d_bytes_per_second": 1e15, "d2h_bytes_per_second": 1e15, "update_params_per_second": 1e15}
STATE_BYTES, WEIGHT_BYTES = {"float32": 8, "bfloat16": 10}, {"float32": 4, "bfloat16": 2}
"""Bytes per parameter of state and weight, by dtype of the weight. The cache holds state, a host slot holds both."""
SIZES = {"cpu": (24, 2048), "cuda": (12, 8192)}
"""Number and width of the layers, by device: 100.7 million parameters with 1.2 GB of state, and 805 million with 9.7
GB."""


def sides(folder: Path, model: Model, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The trainings to compare (sides): for each, by name, those arguments of `DeepSpeed` that differ between sides."""
    for name in ("stock", "ours"):
        (folder / name).mkdir()
    subgroup, weight = model.width**2 // options.subgroups, WEIGHT_BYTES[model.dtype]
    room = HOST_SLOTS * (STATE_BYTES[model.dtype] + weight) + WEIGHT_SLOTS * weight
    cache = max(0, buffer_bytes(model) - room * subgroup)
    block = {"stride": options.stride, "cpu_threads": options.threads, "subgroup_numel": subgroup, "emulated": UNPACED}
    path = {"directory": str(folder / "ours"), "threads": IO_THREADS, "block_bytes": BLOCK_BYTES}
    tiered = {**block, "paths": {"disk": path}, "host_slots": HOST_SLOTS, "host_cache": cache, "gradients": "release"}
    memory = {"device": "cpu", "pin_memory": options.device == "cuda"}
    return {
        "stock_cpu": {"offload": memory},
        "tidegate_cpu": {"offload": memory, "block": block},
        "stock_nvme": {"offload": on_nvme(str(folder / "stock"))},
        "tidegate_nvme": {"offload": {"device": "cpu"}, "block": tiered},
        **({"asynchronous_cpu": {"offload": memory, "asynchronous": True}} if options.device == "cuda" else {}),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    model = Model(
        layers=options.layers, width=options.width, dtype="bfloat16" if options.device == "cuda" else "float32"
    )
    settings = {"model": model, "threads": options.threads, "device": options.device}
    settings |= {"block_bytes": BLOCK_BYTES, "depth": 2 * IO_THREADS}
    rounds: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(Side(DeepSpeed, **settings, **own))
            for name, own in sides(folder, model, options).items()
        }
        for side in running.values():
            for _ in range(WARM_UP):
                side.step()
        end, names = time.monotonic() + options.seconds, list(running)
        for done in range(options.rounds):
            if done >= LEAST_ROUNDS and time.monotonic() > end:
                break
            random.Random(done).shuffle(names)
            for name in names:
                rounds.setdefault(name, []).append(running[name].step())
    return rounds


def result(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    def ratio(tier: str, key: str, other: str = "stock") -> dict[str, float]:
        theirs, ours = ([float(one[key]) for one in rounds[f"{who}_{tier}"]] for who in (other, "tidegate"))
        return spread(ratios(theirs, ours), 3)

    spreads = {
        "update_ratio_nvme": ratio("nvme", "update"),
        "iteration_ratio_nvme": ratio("nvme", "iteration"),
        "update_ratio_cpu": ratio("cpu", "update"),
        "iteration_ratio_cpu": ratio("cpu", "iteration"),
    }
    if "asynchronous_cpu" in rounds:
        spreads["iteration_ratio_cpu_asynchronous"] = ratio("cpu", "iteration", "asynchronous")
    return {
        "iteration_ratio_cpu_asynchronous": None,
        **{name: figures["median"] for name, figures in spreads.items()},
        **({} if "asynchronous_cpu" in rounds else {"note": "no CUDA: asynchronous copies alone were not measured"}),
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
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "emulated, unpaced",
        "stride": options.stride,
        "subgroups_per_layer": options.subgroups,
        "cpu": cpu_name(),
        "cores": options.threads,
        "kernel": platform.release(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "tidegate")},
    }


def _stride(text: str) -> float | str:
    return text if text in ("auto", "off") else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure; a folder in it is used")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="12 with CUDA, else 24")
    parser.add_argument("--width", type=int, help="a layer has width² parameters; 8192 with CUDA, else 2048")
    parser.add_argument("--stride", type=_stride, help="ours; auto with CUDA, else off: all on the CPU")
    parser.add_argument("--subgroups", type=int, default=2, help="ours, of each layer: 2 for halves of it")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round after this long")
    parser.add_argument("--json", action="store_true", help="print nothing but the result, which is all there is")
    options = parser.parse_args()
    options.layers = options.layers or SIZES[options.device][0]
    options.width = options.width or SIZES[options.device][1]
    options.stride = options.stride or ("auto" if options.device == "cuda" else "off")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: leave --device out")
    check_nvme(options.device)
    with tempfile.TemporaryDirectory(prefix="iteration-", dir=options.directory) as folder:
        print(json.dumps(result(measure(Path(folder).resolve(), options), options)))


if __name__ == "__main__":
    main()
