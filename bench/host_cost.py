"""Measures the CPU time of the host for each op, by lane, in microseconds. The work of the GPU is not included.

**The runtime is a fake one**: TorchCuda runs with the installed torch's own context managers on a substitute for
`torch.cuda` whose streams run everything immediately (`tests/agent/devices/fake_torch.py`). So the figures include the
time of the substitute instead of that of the CUDA driver. They show the Python time of executor, runner and device, and
serve to compare versions of that code on the same machine. They say nothing about a GPU.

Subgroups are tiny, so that the time for arithmetic and copies is negligible. Measured is the CPU time of the thread of
each lane.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.fake_torch import FakeKernels, fake_torch
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.engine import executor as executor_module
from tidegate.agent.optimizer import offloaded_optimizer as optimizer_module

SUBGROUPS = 64
SUBGROUP_NUMEL = 256
WARM_UP_STEPS = 3


@contextmanager
def timed_lanes(seconds: dict[str, list[float]]) -> Iterator[None]:
    """Context manager in which the CPU seconds of every executed op are measured. They are appended to the list of
    the op's lane in `seconds`."""
    run = executor_module.Executor._run

    def timed(executor: Any, place: int, *others: Any) -> None:
        lane = executor._current().plan.ops[place].lane
        began = time.thread_time()
        try:
            run(executor, place, *others)
        finally:
            seconds[lane].append(time.thread_time() - began)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module.Executor, "_run", timed)
        yield


def measure(steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = defaultdict(list)
    with fake_torch() as driver, timed_lanes(seconds), pytest.MonkeyPatch.context() as patch:
        device = CudaDevice(TorchCuda(torch.device("cuda", 1), FakeKernels(driver)))
        patch.setattr(optimizer_module, "choose_device", lambda *_: device)
        params = [torch.nn.Parameter(torch.zeros(SUBGROUP_NUMEL)) for _ in range(SUBGROUPS)]
        settings = tidegate.Offload(subgroup_numel=SUBGROUP_NUMEL, stride=2.0, static_ratio=0.25, cpu_threads=1)
        with tidegate.AdamW(params, offload=settings) as optimizer:
            for step in range(WARM_UP_STEPS + steps):
                if step == WARM_UP_STEPS:
                    seconds.clear()
                    events = driver.events_made
                optimizer.zero_grad()
                torch.autograd.backward(params, [torch.ones_like(param) for param in params])
                optimizer.step()
            events = driver.events_made - events
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "runtime": "fake",
        "steps": steps,
        "ops_per_step": sum(map(len, seconds.values())) // steps,
        "events_made": events,
        "microseconds_per_op": {lane: of(found) for lane, found in sorted(seconds.items())},
    }


def of(seconds: list[float]) -> dict[str, float]:
    """Mean and quartiles of the op times of one lane, in microseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    found = {"mean": statistics.mean(seconds), "low": low, "median": middle, "high": high}
    return {name: round(value * 1e6, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps that are measured")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    print(json.dumps(measure(options.steps), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
