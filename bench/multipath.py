"""Claim: several paths together have the sum of their throughputs, their tier split is the best one, and it follows a
change of speed.

The bench runs with two paths, then with three. Each path is a file system on a loop device, whose file is on a disk for
the first path and in memory for the others. The kernel limits each path to a different speed, the same for reads and
writes (blkio controller of cgroup v1). The engine does not know these speeds. fio in the same control group measures
each path alone, with as many reads as writes, and with the same block size and queue depth. Needs root, loop devices,
the blkio controller and fio; a message names what is missing.

The best split is the one with the shortest time for all reads and writes, computed from fio's rates.

* `aggregate_share`: throughput of an update on all paths, divided by the sum of fio's rates.
* `split_off_by`: difference between the engine's tier split and the best split: the largest difference of any path, in
  subgroups.

Then the fastest path is slowed down to a quarter while training continues. fio measures this path again, which gives a
new best split:

* `steps_to_adapt`: the first step whose update takes at most 1.1 times the time of the new best split.
* `slowed_step_ratio`: median time of the updates from that step on, divided by the time of the new best split.
  `slowed_step_ratio_longest`: the same for the longest of these updates.
* `split_off_by`: difference between the last tier split and the new best split.

The device is emulated, so that the results say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from storage import fio
from storage.figures import cpu_name, spread
from storage.group import Group
from storage.ours import Ours
from storage.side import Model, Side
from storage.throttled import BLKIO, ThrottledPath, unavailable

from tidegate.plan.interference import DUPLEX
from tidegate.plan.tier_split import PathSpeeds, balanced_split, makespan_seconds

MB = 10**6
SPEEDS = {"disk": 200 * MB, "memory": 100 * MB, "archive": 50 * MB}
"""Speed of each path in bytes per second, in each direction. A run with two paths has the first two."""
SLOWED = 4
NEAR = 1.1
"""The engine has adapted to a change of speed when an update takes at most this multiple of the time with the best tier
split."""
WARM_UP = 2
IO_THREADS = 4
BLOCK_BYTES = 1 << 20
STATE_BYTES_PER_PARAM = 8
MIX = fio.Mix(block_bytes=BLOCK_BYTES, depth=2 * IO_THREADS, file_bytes=128 << 20, seconds=3.0)


def speeds_of(rates: dict[str, float]) -> dict[str, PathSpeeds]:
    """Read and write speed of each path. rates: bytes per second by fio, for reads and writes together; each direction
    has half of them."""
    return {name: PathSpeeds(read_bytes_per_second=r / 2, write_bytes_per_second=r / 2, factors=DUPLEX)
            for name, r in rates.items()}  # fmt: skip


def counts_of(split: str) -> dict[str, int]:
    return {name: int(count) for name, _, count in (part.partition(":") for part in split.split(","))}


def off_by(split: str, best: dict[str, int]) -> int:
    return max(abs(counts_of(split).get(name, 0) - count) for name, count in best.items())


def moved_a_second(step: dict[str, Any]) -> float:
    return float(step["bytes_in_step"] / step["seconds_in_step"])


def estimated(step: dict[str, Any]) -> dict[str, list[float]]:
    """The engine's estimate of each path's read and write speed, in MB/s."""
    return {
        name: [round(speeds[f"{way}_bytes_per_second"] / MB, 1) for way in ("read", "write")]
        for name, speeds in step["speeds"].items()
    }


def steady(side: Side, rates: dict[str, float], subgroups: int, steps: int) -> dict[str, Any]:
    """Trains `steps` steps while the speeds of the paths are constant, and returns the figures of the first part of the
    bench. rates: bytes per second of each path by fio. subgroups: number of subgroups."""
    done = [side.step() for _ in range(steps)]
    best = balanced_split(subgroups, speeds_of(rates))
    shares = [moved_a_second(step) / sum(rates.values()) for step in done]
    return {
        "aggregate_share": round(statistics.median(shares), 4),
        "split": done[-1]["split"],
        "best_split": best,
        "split_off_by": off_by(done[-1]["split"], best),
        "update_seconds": spread([step["seconds_in_step"] for step in done]),
        "estimated_mb_per_second": estimated(done[-1]),
        "spread": {"aggregate_share": spread(shares)},
    }


def slowed(side: Side, rates: dict[str, float], subgroups: int, subgroup_bytes: int, steps: int) -> dict[str, Any]:
    """Trains `steps` steps after one path has been slowed down, and returns the figures of the second part of the
    bench. rates: bytes per second of each path by fio after the change. subgroups: number of subgroups."""
    speeds = speeds_of(rates)
    best = balanced_split(subgroups, speeds)
    best_seconds = makespan_seconds(best, speeds, subgroup_bytes)
    done = [side.step() for _ in range(steps)]
    ratios = [step["seconds_in_step"] / best_seconds for step in done]
    near = next((i for i, ratio in enumerate(ratios) if ratio <= NEAR), None)
    after = ratios[near:] if near is not None else []
    return {
        "steps_to_adapt": near + 1 if near is not None else None,
        "slowed_step_ratio": round(statistics.median(after), 3) if after else None,
        "slowed_step_ratio_longest": round(max(after), 3) if after else None,
        "split": done[-1]["split"],
        "split_off_by": off_by(done[-1]["split"], best),
        "best_split": best,
        "best_update_seconds": round(best_seconds, 3),
        "update_seconds_by_step": [round(step["seconds_in_step"], 3) for step in done],
        "split_by_step": [step["split"] for step in done],
        "estimated_mb_per_second": estimated(done[-1]),
    }


def measure_paths(names: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one training on these paths: first at constant speed, then after the first path is slowed down."""
    model = Model(layers=options.layers, width=options.width)
    subgroup = model.width**2 // options.subgroups_per_layer
    count, state = model.numel // subgroup, STATE_BYTES_PER_PARAM * model.numel
    with ExitStack() as stack:
        group = stack.enter_context(Group(BLKIO))
        paths = {
            name: stack.enter_context(
                ThrottledPath(
                    group,
                    folder / f"{name}-of-{len(names)}",
                    folder if name == "disk" else Path("/dev/shm"),
                    state + (256 << 20),
                    SPEEDS[name],
                )
            )
            for name in names
        }
        rates = {name: path.fio_rate(MIX) for name, path in paths.items()}
        (folder / f"locks-{len(names)}").mkdir(mode=0o700)
        side = stack.enter_context(
            Side(
                Ours,
                join=group.members,
                model=model,
                offload={
                    "paths": {
                        name: {"directory": str(path.directory), "threads": IO_THREADS, "block_bytes": BLOCK_BYTES}
                        for name, path in paths.items()
                    },
                    "stride": "off",
                    "subgroup_numel": subgroup,
                    "host_cache": 0,
                    "gradients": "release",
                },
                lock_directory=str(folder / f"locks-{len(names)}"),
                threads=options.threads,
            )
        )
        for _ in range(WARM_UP):
            side.step()
        constant = steady(side, rates, count, options.steps)
        first = paths[names[0]]
        first.throttle(first.bytes_per_second // SLOWED)
        slower = {**rates, names[0]: first.fio_rate(MIX)}
        changed = slowed(side, slower, count, STATE_BYTES_PER_PARAM * subgroup, options.steps)
    return {
        "fio_mb_per_second_alone": {name: round(rate / MB, 1) for name, rate in rates.items()},
        "subgroups": count,
        "constant": constant,
        "slowed": {"fio_mb_per_second_alone": {n: round(rate / MB, 1) for n, rate in slower.items()}, **changed},
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    names = list(SPEEDS)
    found = {f"{count}_paths": measure_paths(names[:count], folder, options) for count in (2, 3)}
    return {
        "aggregate_share": min(one["constant"]["aggregate_share"] for one in found.values()),
        "split_off_by": max(one["constant"]["split_off_by"] for one in found.values()),
        "steps_to_adapt": [one["slowed"]["steps_to_adapt"] for one in found.values()],
        "slowed_step_ratio": [one["slowed"]["slowed_step_ratio"] for one in found.values()],
        **found,
        "throttled_to_mb_per_second_each_way": {name: speed // MB for name, speed in SPEEDS.items()},
        "parameters": options.layers * options.width**2,
        "device": "emulated",
        "cpu": cpu_name(),
        "cores": options.threads,
        "kernel": platform.release(),
        "note": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="a folder in it is used")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048, help="a layer has width² parameters")
    parser.add_argument("--subgroups-per-layer", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="with constant speeds, and as many after the change")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    reason = unavailable() or fio.available()
    if reason:
        print(json.dumps({"aggregate_share": None, "note": reason}))
        return
    if not options.json:
        print(f"paths of {[speed // MB for speed in SPEEDS.values()]} MB/s ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="multipath-", dir=options.directory) as folder:
        print(json.dumps(measure(Path(folder).resolve(), options)))


if __name__ == "__main__":
    main()
