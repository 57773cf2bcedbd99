"""Claim: in real time the tuner comes near the best stride within 20 steps, adapts to a link that gets half as fast,
and does not change the stride without need.

One training runs on an emulated device. Link, device update and CPU update (the last by a wrapper in this bench) are
slowed down to stated rates, so far that this machine's own speed has little influence. Threads, plans, clocks, spans,
rates, predictions and decisions are real. There are four parts:

* `before`, `halved`: times of every stride, in interleaved rounds, to know the best one. In `halved` the link has half
  of its rate. The engine is not told, and only sees longer copies.
* `from_worst`: the run begins with the slowest stride, then `auto` decides for 20 steps. `off_best`: how much longer
  the update takes with the last stride than with the best one, by the medians of `before`.
* `after_halving`: the link gets half as fast during training; then follow a given number of steps. `off_best` is by the
  medians of `halved`.
* `with_noise`: the link's rate is random in each step, ±20 % (seeded). `changes`: changes of the effective stride,
  including those for comparisons. The target is at most one in 50 steps.

tests/tuner/test_convergence.py tests the same in virtual time, without disturbances.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from itertools import pairwise
from typing import Any

import torch
from storage.figures import cpu_name
from strides.training import Training

import tidegate
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.knobs.knobs import OFF, Knobs, Off

STRIDES: tuple[float | Off, ...] = (
    OFF, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0,
)  # fmt: skip
NEAR, STEPS_TO_BEST, STEPS_PER_CHANGE = 0.05, 20, 50
NOISE = 0.2
Times = dict[float | Off, float]


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    training = Training(
        options.numel, options.subgroups, cpu_threads=1, device="emulated",
        emulated=tidegate.EmulatedRates(
            h2d_bytes_per_second=options.link, d2h_bytes_per_second=options.link,
            update_params_per_second=options.update,
        ),
    )  # fmt: skip
    training.pace_cpu(options.cpu)
    try:
        found = measured(training, options)
    finally:
        training.close()
    print(json.dumps(found) if options.json else json.dumps(found, indent=1))
    return 0


def measured(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    before = sweep(training, options.rounds)
    pace(training, options.link / 2)
    halved = sweep(training, options.rounds)
    pace(training, options.link)
    worst = max(before, key=before.__getitem__)
    training.optimizer._set_auto(stride=worst)
    training.optimizer.apply_knobs(Knobs(stride="auto"))
    with tidegate.attach(training.optimizer, None, run="tuner") as attachment:
        said = attachment.tuning.tuner
        from_worst = steps(training, STEPS_TO_BEST)
        first = near(from_worst, before) | {"from": worst, "said": said.last_verdict}
        settling = steps(training, options.settling_steps)
        pace(training, options.link / 2)
        followed = steps(training, options.following_steps)
        second = near(followed, halved) | {"from": followed[0], "said": said.last_verdict}
        pace(training, options.link)
        steps(training, options.settling_steps)
        chance = random.Random(0)
        noisy = [one for _ in range(options.noisy_steps) for one in noisy_step(training, options.link, chance)]
    return {
        "bench": "tuner",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "os": platform.platform()},
        "device": "emulated",
        "rates": {"link": options.link, "device": options.update, "cpu": options.cpu},
        "numel": options.numel,
        "targets": {"off_best": NEAR, "steps": STEPS_TO_BEST, "steps_per_change": STEPS_PER_CHANGE},
        "before": shown(before),
        "halved": shown(halved),
        "from_worst": first,
        "while_settling": {"strides": strides(settling), "off_best": off_best(settling[-1], before)},
        "after_halving": second,
        "with_noise": {
            "steps": len(noisy),
            "changes": changes(noisy),
            "strides": strides(noisy),
            "off_best": off_best(noisy[-1], before),
        },
    }


def sweep(training: Training, rounds: int) -> Times:
    """Median update time in seconds, by stride. Each round runs every stride, and counts the shorter of two updates."""
    chance = random.Random(1)
    times: dict[float | Off, list[float]] = {stride: [] for stride in STRIDES}
    for _ in range(rounds):
        for stride in chance.sample(STRIDES, len(STRIDES)):
            training.optimizer.apply_knobs(Knobs(stride=stride))
            training.step()
            times[stride].append(min(training.step() for _ in range(2)))
    return {stride: statistics.median(found) for stride, found in times.items()}


def pace(training: Training, bytes_per_second: float) -> None:
    device = training.optimizer.device
    if not isinstance(device, EmulatedDevice):
        raise TypeError(f"The link speed can be set for an emulated device only, this device is {device.kind}.")
    device.rates.h2d_bytes_per_second = device.rates.d2h_bytes_per_second = bytes_per_second


def steps(training: Training, count: int) -> list[float | Off]:
    """Runs `count` steps, and returns the stride that is in force after each."""
    return [stride for _ in range(count) for stride in one_step(training)]


def one_step(training: Training) -> list[float | Off]:
    training.step()
    return [training.optimizer.engine.effective.stride]


def noisy_step(training: Training, link: float, chance: random.Random) -> list[float | Off]:
    pace(training, link * chance.uniform(1 - NOISE, 1 + NOISE))
    return one_step(training)


def near(ran: list[float | Off], times: Times) -> dict[str, Any]:
    """Compares the strides of successive steps (`ran`) with the best stride. `off_best`: how much longer the update
    takes with the last stride than with the best one, as a share. `near_from_step`: the first step from which on this
    share is at most NEAR; None if there is no such step."""
    offs = [off_best(stride, times) for stride in ran]
    stayed = next((i for i in range(len(offs)) if max(offs[i:]) <= NEAR), None)
    return {
        "off_best": offs[-1], "best": min(times, key=times.__getitem__), "ended_with": ran[-1],
        "near_from_step": None if stayed is None else stayed + 1, "strides": strides(ran),
    }  # fmt: skip


def off_best(stride: float | Off, times: Times) -> float:
    """How much longer the update takes with this stride than with the best one, as a share. For a stride that was not
    measured, the slower one of its neighbours counts."""
    best = min(times.values())
    if stride in times:
        return round(times[stride] / best - 1, 4)
    numbers = sorted(one for one in times if one != OFF)
    below = max((one for one in numbers if one < stride), default=numbers[0])
    above = min((one for one in numbers if one > stride), default=OFF)
    return round(max(times[below], times[above]) / best - 1, 4)


def changes(ran: list[float | Off]) -> int:
    return sum(one != other for one, other in pairwise(ran))


def strides(ran: list[float | Off]) -> list[tuple[int, float | Off]]:
    """The changes of the stride as (step, stride). The first entry is the stride of the first step."""
    return [(i + 1, one) for i, one in enumerate(ran) if i == 0 or one != ran[i - 1]]


def shown(times: Times) -> dict[str, float]:
    return {str(stride): round(seconds, 4) for stride, seconds in times.items()}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--numel", type=int, default=4_800_000, help="parameters")
    parser.add_argument("--subgroups", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7, help="of each sweep over all strides")
    parser.add_argument("--link", type=float, default=2e8, help="bytes per second each way")
    parser.add_argument("--update", type=float, default=1e8, help="parameters per second of the device")
    parser.add_argument("--cpu", type=float, default=2e7, help="parameters per second of the CPU")
    parser.add_argument("--settling-steps", type=int, default=40)
    parser.add_argument("--following-steps", type=int, default=30)
    parser.add_argument("--noisy-steps", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
