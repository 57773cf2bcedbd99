"""Claim: the stride that `auto` finds is as fast as the best fixed one, and dynamic interleaving beats a static split.

The bench compares five configurations: all updates on the CPU; TwinFlow's static split (residents first, then the other
subgroups on the CPU, one op at a time); the same residents with interleaving; strides 1 to 8 without residents; and
`auto`, which begins with stride 2 and tunes itself before the rounds. Every round runs each configuration once, in
random order (seeded): one step that is not counted, then several steps, whose median is the result of the round.
Intervals are bootstrap intervals (95 %) of the median over rounds. Ratios are computed within each round.

On a GPU copies and updates are real. Otherwise the device is emulated: its lanes, and also the CPU update (by a wrapper
in this bench; `--cpu 0` switches it off), are slowed down to stated rates, so far that this machine's own speed has
little influence. Then the results say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from contextlib import ExitStack
from typing import Any

import torch
from storage.figures import cpu_name
from strides.intervals import interval, ratio
from strides.training import Training

import tidegate
from tidegate.knobs.knobs import Knobs

STRIDES = tuple(range(1, 9))
EMULATED_NUMEL, GPU_NUMEL = 4_800_000, 800_000_000
CPU, TWINFLOW, RESIDENTS, AUTO = "all on the CPU", "twinflow", "auto, same residents", "auto"


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    emulated = options.device == "emulated" or not torch.cuda.is_available()
    options.numel = options.numel or (EMULATED_NUMEL if emulated else GPU_NUMEL)
    with ExitStack() as stack:
        trainings = {
            name: Training(
                options.numel, options.subgroups, cpu_threads=options.cpu_threads, device=options.device,
                emulated=tidegate.EmulatedRates(
                    h2d_bytes_per_second=options.link, d2h_bytes_per_second=options.link,
                    update_params_per_second=options.update,
                ),
                **settings,
            )
            for name, settings in (
                ("fixed", {"stride": "off"}),
                (TWINFLOW, {"policy": "twinflow", "static_ratio": options.static_ratio}),
                (RESIDENTS, {"static_ratio": options.static_ratio}),
                (AUTO, {}),
            )
        }  # fmt: skip
        for training in trainings.values():
            stack.callback(training.close)
            if emulated and options.cpu:
                training.pace_cpu(options.cpu)
        found = measured(trainings, options)
    print(json.dumps(found) if options.json else text(found))
    return 0


def measured(trainings: dict[str, Training], options: argparse.Namespace) -> dict[str, Any]:
    attached = {
        name: tidegate.attach(trainings[name].optimizer, None, run=f"interleaving-{i}")
        for i, name in enumerate((RESIDENTS, AUTO))
    }
    for name in attached:
        for _ in range(options.tuning_steps):
            trainings[name].step()
    configurations: dict[str, tuple[str, Knobs | None]] = {CPU: ("fixed", Knobs(stride="off"))}
    configurations |= {f"stride {k}": ("fixed", Knobs(stride=k)) for k in STRIDES}
    configurations |= {name: (name, None) for name in (TWINFLOW, RESIDENTS, AUTO)}
    times: dict[str, list[float]] = {name: [] for name in configurations}
    chance = random.Random(0)
    auto_strides: list[Any] = []
    for _ in range(options.rounds):
        for name in chance.sample(list(configurations), len(configurations)):
            training, knobs = trainings[configurations[name][0]], configurations[name][1]
            if knobs is not None:
                training.optimizer.apply_knobs(knobs)
            training.step()
            times[name].append(statistics.median(training.step() for _ in range(options.steps)))
        auto_strides.append(trainings[AUTO].optimizer.engine.effective.stride)
    fixed = [name for name in times if name == CPU or name.startswith("stride")]
    best = min(fixed, key=lambda name: statistics.median(times[name]))
    emulated = trainings[AUTO].device == "emulated"
    return {
        "bench": "interleaving",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "os": platform.platform()},
        "device": trainings[AUTO].device,
        "emulated_rates": {"link": options.link, "device": options.update, "cpu": options.cpu} if emulated else None,
        "claims": "none about a GPU: copies and device updates are paced" if emulated else "of this GPU",
        "numel": options.numel,
        "subgroups": len(trainings[AUTO].optimizer.engine.layouts),
        "static_ratio": options.static_ratio,
        "rounds": options.rounds,
        "steps": options.steps,
        "update_seconds": {name: interval(found) for name, found in times.items()},
        "speedup_over_cpu": {name: ratio(times[CPU], found) for name, found in times.items()},
        "best_fixed": best,
        "auto_strides": sorted({str(stride) for stride in auto_strides}),
        "auto_by_best_fixed": ratio(times[AUTO], times[best]),
        "twinflow_by_auto_same_residents": ratio(times[TWINFLOW], times[RESIDENTS]),
        "tuner_said": attached[AUTO].tuning.tuner.last_verdict,
    }


def text(found: dict[str, Any]) -> str:
    rows = [
        f"{name:24} {row['median'] * 1e3:8.1f} ms ({row['low'] * 1e3:.1f} to {row['high'] * 1e3:.1f})"
        for name, row in found["update_seconds"].items()
    ]
    closing = [
        f"device: {found['device']}; claims: {found['claims']}",
        f"auto ran stride {', '.join(found['auto_strides'])}; best fixed: {found['best_fixed']}; "
        f"auto takes {found['auto_by_best_fixed']} of its time",
        f"twinflow takes {found['twinflow_by_auto_same_residents']} of the time of auto with the same residents",
    ]
    return "\n".join([*rows, *closing])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="auto", choices=("auto", "emulated"))
    parser.add_argument("--numel", type=int, default=0, help="parameters; 0 for a size that suits the device")
    parser.add_argument("--subgroups", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each configuration in a round")
    parser.add_argument("--tuning-steps", type=int, default=60)
    parser.add_argument("--static-ratio", type=float, default=0.25, help="residents of TwinFlow")
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--link", type=float, default=2e8, help="bytes per second each way of an emulated device")
    parser.add_argument("--update", type=float, default=1e8, help="parameters per second of an emulated device")
    parser.add_argument(
        "--cpu", type=float, default=2e7, help="parameters per second of the CPU beside it; 0: as it is"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
