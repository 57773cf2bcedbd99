"""Claim: an update on the CPU is as fast as with lanes that are bound to cores by hand.

Linux often wakes a thread on the core of the thread that wakes it, although other cores are idle. Tidegate's threads
leave a core on which another of them computes (`kernels/src/computing_cores.h`), and no core is fixed for a lane. Two
trainings are compared in turns. In one, the threads are placed as always. In the other, the CPU lane has a core of its
own, and all other lanes share another core. Both are measured without storage paths, and with all state in the host
cache of a path. There, weights are copied to the host during the update, so that more threads wake.

The device is emulated, so that copies take a core. On a GPU they take none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from predicting.emulation import affordable
from predicting.training import STATE_BYTES, Training
from storage.figures import cpu_name

from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import Knobs, specs_for

NUMEL = 1 << 25
SETTLING, COUNTED = 2, 3
"""Steps after each change of trainings that are not counted, and those that are."""
BACKWARD_SECONDS = 0.06


def training(paths: Mapping[str, PathSettings], device: EmulatedRates, subgroups: int, cores: list[int]) -> Training:
    """A training on one CPU thread that has all its state in host memory. If `cores` are given, the CPU lane is bound
    to the first one, and the other lanes to the second one."""
    before = set(threading.enumerate())
    allowed = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, {cores[1]})  # new threads inherit it
    made = Training(numel=NUMEL, subgroup_numel=NUMEL // subgroups, paths=paths, device=device, cpu_threads=1)
    knobs: dict[str, object] = {"stride": "off", "static_ratio": 0.0}
    if paths:
        knobs |= {"host_cache": NUMEL * STATE_BYTES, "order": "pinned"}
    made.turn(Knobs().changed(knobs, specs_for(tuple(paths))))
    made.step(BACKWARD_SECONDS)
    os.sched_setaffinity(0, allowed)
    for thread in set(threading.enumerate()) - before:
        if cores and thread.name == "tidegate-cpu" and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {cores[0]})
    return made


def compared(sides: Mapping[str, Training], rounds: int) -> dict[str, Any]:
    """Runs the trainings in turns, and compares the times of their updates round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            steps = [sides[name].step(BACKWARD_SECONDS).update_seconds for _ in range(SETTLING + COUNTED)]
            seconds[name].append(statistics.median(steps[SETTLING:]))
    shares = [bound / free for bound, free in zip(seconds["bound"], seconds["free"], strict=True)]
    return {
        "share_of_bound": spread(shares),
        "update_milliseconds": {name: spread([1e3 * value for value in values]) for name, values in seconds.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def measure(folder: Path, subgroups: int, rounds: int) -> dict[str, Any]:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise SystemExit("This process may use one core only; the comparison needs two.")
    device, found = affordable(), {}
    for kind in ("without_paths", "with_a_path"):
        with ExitStack() as stack:
            sides = {}
            for side, cores in (("free", []), ("bound", allowed[-2:])):
                (folder / side).mkdir(exist_ok=True)
                paths = {"path": PathSettings(directory=folder / side)} if kind == "with_a_path" else {}
                sides[side] = stack.enter_context(closing(training(paths, device, subgroups, cores)))
            found[kind] = compared(sides, rounds)
    return {
        "share_of_bound": min(found[kind]["share_of_bound"]["median"] for kind in found),
        "kinds": found,
        "parameters": NUMEL,
        "subgroups": subgroups,
        "rounds": rounds,
        "device": "emulated",
        "cpu": cpu_name(),
        "cores": len(allowed),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="for a path, which gets a folder in it")
    parser.add_argument("--subgroups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.json:
        print(f"{options.rounds} rounds without paths, then as many with one ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="placement-", dir=options.directory) as folder:
        print(json.dumps(measure(Path(folder).resolve(), options.subgroups, options.rounds)))


if __name__ == "__main__":
    main()
