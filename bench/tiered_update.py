"""Claim: with state on one disk and the same host memory, backward and update take far less time than DeepSpeed's.

DeepSpeed is ZeRO-3 with `offload_optimizer: nvme`, pipelined in both directions, on its CPU accelerator. Tidegate and
DeepSpeed train the same fp32 model, each in its own process, on the same disk, past the page cache, with buffers in
huge pages; a third process trains it with Tidegate in bf16 with remainders. Rounds are interleaved. Each round also
runs fio and Tidegate's native direct I/O alone, with the block size, the queue depth and the share of reads of
Tidegate's update, because disks of virtual machines are throttled in bursts. An update reads more than it writes: some
of its flushes go on beside the next forward. So each round runs two iterations of a training, and measures the second.

Every process has weights and gradients in host memory. With a GPU they would be in its memory; here the device is
emulated, so that the results say nothing about a GPU. The memory budget (`budget`) is for staging buffers and cache:
DeepSpeed gets the least memory with which it can pipeline, and Tidegate the same amount, which is less than a quarter
of its state. Where control groups are available, the total memory of each process is also limited, to about what
DeepSpeed's process used during its first steps.

* `ratio_vs_deepspeed`: DeepSpeed's time of backward and update, divided by Tidegate's; `iteration_ratio`: the same with
  the forward.
* `bound_ratio_by_bytes`: this ratio if both ran at the speed of the disk: DeepSpeed's bytes divided by Tidegate's.
* `share_of_disk_bandwidth`: throughput of Tidegate's update, divided by fio's; `share_of_io_layer`: divided by that of
  Tidegate's native direct I/O alone, with checksums.
* `io_layer_share_of_fio`: throughput of Tidegate's native direct I/O alone, with checksums, divided by fio's;
  `without_checksums_share_of_fio`: the same without checksums. Then no CPU core touches the transferred data, as in
  fio. An update has to read and write all of it.
* `in_little_memory_share_of_fio`: throughput of Tidegate's direct I/O without checksums in as much memory as fio has
  (8 MiB), divided by fio's. `without_checksums_share_of_fio` is that in memory for 12 subgroups. On some virtual
  machines, data arrive faster in memory that is in the caches.
* `disk_busy`: share of the time of Tidegate's update in which a fetch or a flush is in progress. At 1, the disk always
  has work, and only a faster disk could make the update shorter.
* `overlap`: time in which a fetch, an update and a flush are all in progress, divided by the shortest of their three
  busy times; `overlap_of_pairs`: the same for two of them. Flushes that are deferred overlap with neither.
* `overlap_behind_simulated`: how much lower `overlap` is than that of the simulator, for the same plan and the same
  time of each op. In the simulator, a lane begins an op in the moment in which it can.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from storage import fio, io_layer
from storage.deepspeed_side import DeepSpeed, buffer_bytes, check_nvme, on_nvme
from storage.figures import cpu_name, ratios, spread
from storage.group import MemoryGroup, memory_unavailable
from storage.ours import Ours
from storage.side import Model, Side

from tidegate.plan.slot_sizes import WEIGHT_SLOTS

WARM_UP = 4
"""Rounds before the first measured one. Tidegate defers flushes only after some steps."""
LIMIT_BY_PEAK = 1.05
"""Memory limit of every process, as a multiple of the highest use of DeepSpeed's process during the warm-up."""
IO_THREADS = 4
"""Number of threads that read, and of threads that write."""
STATE_BYTES, WEIGHT_BYTES = {"float32": 8, "bfloat16": 10}, {"float32": 4, "bfloat16": 2}
"""Bytes per parameter of state and weight, by dtype of the weight. The cache holds state, a host slot holds both."""
OUR_YARDSTICKS = ("io_layer", "without_checksums", "in_little_memory")
"""Measurements of Tidegate's native direct I/O alone."""
Rounds = dict[str, list[dict[str, Any]]]


def our_offload(model: Model, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Offload settings with which slots and cache take as much memory as DeepSpeed's buffers."""
    subgroup, weight = model.width**2 // options.subgroups, WEIGHT_BYTES[model.dtype]
    slots = options.host_slots * (STATE_BYTES[model.dtype] + weight) + WEIGHT_SLOTS * weight
    return {
        "paths": {"disk": {"directory": str(directory), "threads": IO_THREADS, "block_bytes": options.block_kib << 10}},
        "stride": "off",
        "subgroup_numel": subgroup,
        "host_slots": options.host_slots,
        "host_cache": max(0, buffer_bytes(model) - slots * subgroup),
        "gradients": "release",
        "cpu_threads": options.threads,
    }


class Groups:
    """One memory control group for each side. If groups are not available, `reason` says why, and there is no limit."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._groups = stack, dict[str, MemoryGroup]()
        self.reason = memory_unavailable()
        self._limit = 0

    def join(self, name: str) -> str | None:
        """Creates the group of the side with this name. Returns the file to which the side writes its process id, or
        None without groups."""
        if self.reason is not None:
            return None
        self._groups[name] = self._stack.enter_context(MemoryGroup(name))
        return self._groups[name].members

    def bound(self) -> None:
        """Sets the memory limit of all groups. Call this after the warm-up of all sides."""
        if "deepspeed" not in self._groups:
            self.reason = self.reason or "DeepSpeed, whose need is the limit, is not there"
            return
        self._limit = int(LIMIT_BY_PEAK * self._groups["deepspeed"].peak_bytes)
        for group in self._groups.values():
            group.limit(self._limit)

    def told(self) -> dict[str, Any]:
        if self.reason is not None:
            return {"enforced": f"by configuration, not by a control group: {self.reason}"}
        (version,) = {group.version for group in self._groups.values()}
        return {
            "enforced": f"by configuration, and by {version}: the same limit for all memory of each process",
            "limit_bytes": self._limit,
            "peak_bytes": {name: group.peak_bytes for name, group in self._groups.items()},
        }


def start_sides(
    stack: ExitStack, folder: Path, groups: Groups, options: argparse.Namespace
) -> tuple[dict[str, Side], str | None]:
    """Starts all sides. Returns them by name, and the reason why DeepSpeed is not measured, or None."""
    sides, note = {}, None
    for name, dtype in (("tidegate", "float32"), ("tidegate_bf16", "bfloat16")):
        model = Model(layers=options.layers, width=options.width, dtype=dtype)
        (folder / name).mkdir()
        (folder / f"{name}-locks").mkdir(mode=0o700)
        sides[name] = stack.enter_context(
            Side(
                Ours,
                join=groups.join(name),
                model=model,
                offload=our_offload(model, folder / name, options),
                lock_directory=str(folder / f"{name}-locks"),
                threads=options.threads,
            )
        )
    if importlib.util.find_spec("deepspeed") is None:
        return sides, "DeepSpeed is not installed: its ratios are null"
    (folder / "deepspeed").mkdir()
    sides["deepspeed"] = stack.enter_context(
        Side(
            DeepSpeed,
            join=groups.join("deepspeed"),
            model=Model(layers=options.layers, width=options.width),
            offload=on_nvme(str(folder / "deepspeed")),
            block_bytes=options.block_kib << 10,
            depth=2 * IO_THREADS,
            threads=options.threads,
        )
    )
    return sides, note


def yardsticks(folder: Path, options: argparse.Namespace, read_share: float) -> dict[str, Callable[[], float]]:
    """Functions that measure a throughput in bytes per second, by name: of `io_layer`, of the same
    `without_checksums`, of that `in_little_memory`, and of `fio` if it is there."""
    mix = fio.Mix(block_bytes=options.block_kib << 10, depth=2 * IO_THREADS, read_share=read_share)
    state_bytes = options.width**2 // options.subgroups * STATE_BYTES["float32"]
    alone = partial(io_layer.rate, folder / "io_layer", mix, state_bytes)
    found: dict[str, Callable[[], float]] = {
        "io_layer": alone,
        "without_checksums": partial(alone, with_checksums=False),
        "in_little_memory": partial(io_layer.rate_in_little_memory, folder / "little_memory", mix),
    }
    if fio.available() is None:
        found["fio"] = partial(fio.rate, folder / "fio", mix)
    return found


def interleaved(
    sides: dict[str, Side], folder: Path, groups: Groups, options: argparse.Namespace
) -> tuple[Rounds, dict[str, Any]]:
    """Results of every side and of every yardstick, whose files are in `folder`. Each round runs one step of each side,
    and each yardstick, in random order, until rounds or seconds are used up. Also returns the figures of `groups`."""
    warm = {name: [side.step() for _ in range(WARM_UP)][-1] for name, side in sides.items()}
    groups.bound()
    rates = yardsticks(folder, options, round(warm["tidegate"]["read_share_in_step"], 2))
    found: Rounds = {name: [] for name in (*sides, *rates)}
    for rate in rates.values():
        rate()
    shuffle, end = random.Random(0).shuffle, time.monotonic() + options.seconds
    for done in range(options.rounds):
        if done >= 3 and time.monotonic() > end:
            break
        names = list(found)
        shuffle(names)
        for name in names:
            found[name].append({"rate": rates[name]()} if name in rates else sides[name].step())
    return found, groups.told()


def of(rounds: list[dict[str, Any]], key: str) -> list[float]:
    return [float(one[key]) for one in rounds]


def medians(rounds: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Medians over rounds. The result of every round has the dict `key`; returns the median of each of its entries, by
    name."""
    return {name: round(statistics.median(one[key][name] for one in rounds), 4) for name in rounds[0][key]}


def our_figures(rounds: Rounds, name: str, numel: int) -> dict[str, Any]:
    """The figures of the Tidegate training `name`: medians over rounds, and in `spread` median and quartiles of times,
    overlap and shares. numel: number of parameters of the model."""
    ours = rounds[name]
    spreads: dict[str, Any] = {
        **{key: spread(of(ours, key)) for key in ("backward", "update", "backward_and_update", "iteration")},
        "disk_busy": spread(of(ours, "disk_busy")),
        "overlap": spread(of(ours, "overlap")),
        "overlap_behind_simulated": spread([one["simulated_overlap"] - one["overlap"] for one in ours]),
    }
    in_step = ratios(of(ours, "bytes_in_step"), of(ours, "seconds_in_step"))
    spreads["share_of_io_layer"] = spread(ratios(in_step, of(rounds["io_layer"], "rate")))
    if "fio" in rounds:
        disk = of(rounds["fio"], "rate")
        whole = ratios(of(ours, "state_bytes"), of(ours, "backward_and_update"))
        spreads["share_of_disk_bandwidth"] = spread(ratios(in_step, disk))
        spreads["share_with_backward"] = spread(ratios(whole, disk))
    return {
        "bytes_per_param_read": round(statistics.median(of(ours, "read_bytes")) / numel, 3),
        "bytes_per_param_written": round(statistics.median(of(ours, "written_bytes")) / numel, 3),
        "read_share": round(statistics.median(of(ours, "read_share_in_step")), 3),
        "bytes_per_param_of_state_moved": round(statistics.median(of(ours, "state_bytes")) / numel, 3),
        "disk_busy": spreads["disk_busy"]["median"],
        "overlap": spreads["overlap"]["median"],
        "overlap_behind_simulated": spreads["overlap_behind_simulated"]["median"],
        "overlap_of_pairs": medians(ours, "overlap_of_pairs"),
        "share_of_io_layer": spreads["share_of_io_layer"]["median"],
        "share_of_disk_bandwidth": spreads.get("share_of_disk_bandwidth", {}).get("median"),
        "share_with_backward": spreads.get("share_with_backward", {}).get("median"),
        "busy_seconds": medians(ours, "busy_seconds"),
        "host_bytes": ours[-1]["host_bytes"],
        "peak_resident_bytes": ours[-1]["peak_resident_bytes"],
        "spread": spreads,
    }


def result(rounds: Rounds, options: argparse.Namespace) -> dict[str, Any]:
    numel = options.layers * options.width**2
    ours, theirs = rounds["tidegate"], rounds.get("deepspeed")
    figures, bf16 = our_figures(rounds, "tidegate", numel), our_figures(rounds, "tidegate_bf16", numel)
    found: dict[str, Any] = {"ratio_vs_deepspeed": None, "iteration_ratio": None, "bound_ratio_by_bytes": None}
    if theirs is not None:
        moved = [
            sum(statistics.median(of(side, key)) for key in ("read_bytes", "written_bytes")) for side in (theirs, ours)
        ]
        for key, phases in (("ratio_vs_deepspeed", "backward_and_update"), ("iteration_ratio", "iteration")):
            figures["spread"][key] = spread(ratios(of(theirs, phases), of(ours, phases)))
            found[key] = figures["spread"][key]["median"]
        found["bound_ratio_by_bytes"] = round(moved[0] / moved[1], 3)
        found["deepspeed"] = {
            "bytes_per_param_read": round(statistics.median(of(theirs, "read_bytes")) / numel, 3),
            "bytes_per_param_written": round(statistics.median(of(theirs, "written_bytes")) / numel, 3),
            "peak_resident_bytes": theirs[-1]["peak_resident_bytes"],
            "spread": {
                key: spread(of(theirs, key)) for key in ("backward", "update", "backward_and_update", "iteration")
            },
        }
    for name in OUR_YARDSTICKS if "fio" in rounds else ():
        figures["spread"][f"{name}_share_of_fio"] = spread(ratios(of(rounds[name], "rate"), of(rounds["fio"], "rate")))
        found[f"{name}_share_of_fio"] = figures["spread"][f"{name}_share_of_fio"]["median"]
    for name in (name for name in (*OUR_YARDSTICKS, "fio") if name in rounds):
        found[f"{name}_mib_per_second"] = spread([rate / (1 << 20) for rate in of(rounds[name], "rate")], 1)
    return {**found, **figures, "bf16": bf16, "rounds": len(ours)}


def budget(options: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """Bytes of host memory that the trainings use in addition to weights and gradients: DeepSpeed (`bytes`, and as
    `share_of_state`), and each Tidegate training."""
    model = Model(layers=options.layers, width=options.width)
    theirs = buffer_bytes(model)
    found: dict[str, Any] = {"bytes": theirs, "share_of_state": round(theirs / (8 * model.numel), 3)}
    for name, host, gradient in (
        ("tidegate", measured["host_bytes"], 4),
        ("tidegate_bf16", measured["bf16"]["host_bytes"], 2),
    ):
        # All gradients are in the engine's buffers.
        found[f"{name}_bytes"] = sum(host.values()) - gradient * model.numel
    return found


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        groups = Groups(stack)
        sides, note = start_sides(stack, folder, groups, options)
        rounds, enforced = interleaved(sides, folder, groups, options)
    measured = result(rounds, options)
    return {
        **measured,
        "budget": {**budget(options, measured), **enforced},
        "parameters": options.layers * options.width**2,
        "subgroups_per_layer": options.subgroups,
        "host_slots": options.host_slots,
        "block_bytes": options.block_kib << 10,
        "blocks_in_flight": 2 * IO_THREADS,
        "pages": "huge, where the system has them: ours, DeepSpeed's and fio's",
        "device": "emulated",
        "cpu": cpu_name(),
        "cores": options.threads,
        "kernel": platform.release(),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "tidegate")},
        "note": "; ".join(text for text in (fio.available(), note) if text) or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure; a folder in it is used")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--width", type=int, default=2048, help="a layer has width² parameters")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--subgroups", type=int, default=2, help="of each layer: 2 for halves of it, 8 for eighths")
    parser.add_argument("--host-slots", type=int, default=3, help="3 if not given, as in Tidegate's own default")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no round after this long, but do three")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    check_nvme()
    if not options.json:
        numel = options.layers * options.width**2
        print(f"{numel / 1e6:.1f} M parameters in {options.directory.resolve()} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="tiered-update-", dir=options.directory) as folder:
        print(json.dumps(measure(Path(folder).resolve(), options)))


if __name__ == "__main__":
    main()
