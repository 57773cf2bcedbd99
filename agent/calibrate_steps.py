"""Steps of an engine on a device that are taken to be measured: with subgroups of two sizes, interleaved and not."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine.engine import StepResult
from tidegate.agent.offload import Offload
from tidegate.agent.optimizer import AdamW
from tidegate.agent.telemetry.phases import StepPhases
from tidegate.knobs import OFF, Knobs, specs_for
from tidegate.model.in_steps import Step

SUBGROUPS: Final = (4, 16)
"""How many the parameters are divided into."""
STRIDES: Final = (OFF, 3.0)
STEPS: Final = 8
SETTLING: Final = 2
"""Steps after each change of knobs that are not counted."""
BACKWARD_SECONDS: Final = 0.02
"""Long enough for the copies that a backward hides, and for the processors to rest as they do then."""


def engine_steps(device: Device, numel: int, cpu_threads: int) -> list[Step]:
    """Half of those that were taken with each size and stride: the ones around the median of what they took.

    Weights are of 16 bits, state is in host memory. An emulated device is paced as `device` is now.
    """
    rates = device.rates if isinstance(device, EmulatedDevice) else None
    offload = partial(Offload, device="emulated", emulated=rates) if rates else Offload
    found: list[Step] = []
    for count in SUBGROUPS:
        weight = torch.nn.Parameter(torch.full((numel,), 0.01, dtype=torch.bfloat16, device="cpu" if rates else "cuda"))
        gradient = torch.full_like(weight, 1e-3)
        settings = offload(subgroup_numel=-(-numel // count), cpu_threads=cpu_threads, stride=OFF)
        with AdamW([weight], lr=1e-6, offload=settings) as optimizer:
            results: list[StepResult] = []
            optimizer.observers.append(partial(_keep, results))
            for stride in STRIDES:
                optimizer.apply_knobs(Knobs().changed({"stride": stride}, specs_for(())))
                steps = [_step(optimizer, weight, gradient, results) for _ in range(SETTLING + STEPS)][SETTLING:]
                steps.sort(key=lambda step: step.returned - step.called)
                found += steps[STEPS // 4 : -(STEPS // 4)]
    return found


def _keep(results: list[StepResult], result: StepResult, _: StepPhases) -> None:
    results.append(result)


def _step(optimizer: AdamW, weight: torch.nn.Parameter, gradient: torch.Tensor, results: list[StepResult]) -> Step:
    began = time.monotonic()
    weight.backward(gradient)  # added up from step to step: new memory for each would keep processors busy
    time.sleep(max(0.0, began + BACKWARD_SECONDS - time.monotonic()))
    called = time.monotonic()
    optimizer.step()
    returned = time.monotonic()
    return Step(results[-1].plan, results[-1].spans, called, returned, called - began)
