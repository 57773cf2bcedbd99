"""Claim: host cache, 16-bit weights and gradients, the remainder, and several paths each shorten a step with storage
paths.

The variant `all_on` has bf16 weights with 16-bit remainders, bf16 gradients, a host cache of a tenth of the state, two
paths (a disk and memory) with the tier split that the engine finds, and exclusive access: only one process of the node
uses a path at a time. Each other variant turns one of these features off, and `all_off` turns off all of them.
`no_remainder` has fp16 weights, so that their fp32 masters are on the paths; `no_16_bit` has fp32 weights and
gradients. Every variant trains in its own process. Each round runs one step of every variant, in random order.
`slower_by`: update time of the variant divided by that of `all_on`. `state_by_budget`: bytes of state divided by the
host memory for slots and cache.

`processes`: several processes on one disk at the same time, with and without exclusive access. Results are the
throughput of all processes, the time of an operation (without the wait for the lock), and fairness (Jain's index of the
processes' update times: 1 if all are equal).

The device is emulated, so that the results say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.figures import cpu_name, ratios, spread
from storage.ours import Ours
from storage.side import Model, Side

WARM_UP = 3
SUBGROUPS_PER_LAYER = 4
"""Subgroups of each layer. They are small, so that the host memory for slots and cache is only a fraction of the
state."""
STATE_BYTES = {"bfloat16": 10, "float16": 12, "float32": 8}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A configuration of the training. cached_share: host cache, as a share of the state. exclusive: only one process
    of the node uses a path at a time."""

    dtype: str = "bfloat16"
    cached_share: float = 0.1
    paths: int = 2
    exclusive: bool = True


VARIANTS = {
    "all_on": Variant(),
    "no_cache": Variant(cached_share=0.0),
    "no_remainder": Variant(dtype="float16"),
    "no_16_bit": Variant(dtype="float32"),
    "one_path": Variant(paths=1),
    "no_exclusive_access": Variant(exclusive=False),
    "all_off": Variant(dtype="float32", cached_share=0.0, paths=1, exclusive=False),
}


def start(stack: ExitStack, name: str, variant: Variant, model: Model, places: dict[str, Path], locks: Path) -> Side:
    """Starts the training of one variant in its own process. Each of its paths is a new folder `name` in one of the
    first `variant.paths` of `places`."""
    paths = {}
    for place, folder in list(places.items())[: variant.paths]:
        (folder / name).mkdir()
        paths[place] = {"directory": str(folder / name), "lock_slots": int(variant.exclusive)}
    return stack.enter_context(
        Side(
            Ours,
            model=model,
            offload={
                "paths": paths,
                "stride": "off",
                "subgroup_numel": model.width**2 // SUBGROUPS_PER_LAYER,
                "host_cache": int(variant.cached_share * STATE_BYTES[model.dtype] * model.numel),
                "gradients": "release",
            },
            lock_directory=str(locks),
            threads=len(os.sched_getaffinity(0)),
        )
    )


def ablation(folder: Path, memory: Path, options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = {}
        for name, variant in VARIANTS.items():
            (folder / f"locks-{name}").mkdir(mode=0o700)
            model = Model(layers=options.layers, width=options.width, dtype=variant.dtype)
            places = {"disk": folder, "memory": memory}
            sides[name] = start(stack, name, variant, model, places, folder / f"locks-{name}")
        for side in sides.values():
            for _ in range(WARM_UP):
                side.step()
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        shuffle, end = random.Random(0).shuffle, time.monotonic() + options.seconds
        for done in range(options.rounds):
            if done >= 3 and time.monotonic() > end:
                break
            names = list(sides)
            shuffle(names)
            for name in names:
                steps[name].append(sides[name].step())
    best = [step["update"] for step in steps["all_on"]]
    numel = options.layers * options.width**2
    return {
        name: {
            "slower_by": spread(ratios([step["update"] for step in made], best)),
            "update_seconds": spread([step["update"] for step in made]),
            "bytes_per_param_moved": round(made[-1]["state_bytes"] / numel, 2),
            "state_by_budget": round(STATE_BYTES[VARIANTS[name].dtype] * numel / budget(made[-1]["host_bytes"]), 2),
            "split": made[-1]["split"],
        }
        for name, made in steps.items()
    }


def budget(host_bytes: dict[str, int]) -> int:
    """Bytes of host memory without those of gradients, which every variant has in host memory. host_bytes: bytes of
    host memory by kind, as the engine reports them."""
    return sum(nbytes for kind, nbytes in host_bytes.items() if kind != "gradient")


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def crowd(folder: Path, exclusive: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Trains in several processes at the same time on the same disk, and returns throughput, operation times and
    fairness. All processes begin each step together, when all have ended the step before.

    exclusive: only one process uses the disk at a time.
    """
    model = Model(layers=2, width=options.width, dtype="float32")
    kind = Variant(cached_share=0.0, paths=1, exclusive=exclusive, dtype="float32")
    place = folder / ("exclusive" if exclusive else "shared")
    place.mkdir()
    (place / "locks").mkdir(mode=0o700)
    aggregate, fairness, operations, slowest = [], [], [], []
    with ExitStack() as stack, ThreadPoolExecutor(options.processes) as threads:
        sides = [
            start(stack, f"process-{i}", kind, model, {"disk": place}, place / "locks")
            for i in range(options.processes)
        ]
        for done in range(options.rounds + WARM_UP):
            begin = time.monotonic()
            made = list(threads.map(Side.step, sides))
            seconds = time.monotonic() - begin
            if done < WARM_UP:
                continue
            updates = [step["update"] for step in made]
            aggregate.append(sum(step["state_bytes"] for step in made) / seconds / (1 << 20))
            fairness.append(jain(updates))
            slowest.append(max(updates))
            operations += [1e3 * one for step in made for one in step["operation_seconds"]]
    percentiles = statistics.quantiles(operations, n=100)
    return {
        "mib_per_second": spread(aggregate, 1),
        "operation_milliseconds": {"median": round(percentiles[49], 2), "p99": round(percentiles[98], 2)},
        "slowest_update_seconds": spread(slowest),
        "fairness": spread(fairness),
    }


def measure(folder: Path, memory: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.part in ("variants", "both"):
        variants = ablation(folder, memory, options)
        found["slower_by"] = {name: one["slower_by"]["median"] for name, one in variants.items()}
        found["variants"] = variants
    if options.part in ("processes", "both"):
        ways = {"exclusive": True, "shared": False}
        found["processes"] = {
            "count": options.processes,
            **{name: crowd(folder, exclusive, options) for name, exclusive in ways.items()},
        }
    return {
        **found,
        "parameters": options.layers * options.width**2,
        "device": "emulated",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk; a folder in it is used")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="on a tmpfs; a folder in it is used")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048, help="a layer has width² parameters")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--part", choices=("variants", "processes", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no round of variants after this long")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    if not options.json:
        print(f"{', '.join(VARIANTS)}; {options.processes} processes ...", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="ablation-tiers-", dir=options.directory) as folder,
        tempfile.TemporaryDirectory(prefix="ablation-tiers-", dir=options.memory) as memory,
    ):
        print(json.dumps(measure(Path(folder).resolve(), Path(memory), options)))


if __name__ == "__main__":
    main()
