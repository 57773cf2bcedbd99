"""Steps of an engine on a device that are taken to be measured: with subgroups of two sizes, interleaved and not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Final

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import OFF, specs_for
from tidegate.simulator.calibration_fit import Step

TENSORS: Final = 8
"""Gradients come one after the other, and their copies begin with the first."""
SUBGROUPS: Final = (4, 16)
"""How many the parameters are divided into."""
STRIDES: Final = (OFF, 4.0)
STEPS, PATH_STEPS = 8, 4
"""That are taken with each size and stride, and with each size on a path; half of them count."""
SETTLING: Final = 2
"""Steps after each change of knobs that are not counted."""
REST_SECONDS: Final = 0.1
"""Between the last copy of a gradient and `step()`: what a backward hides must not go on into the update, and the
processors rest as they do in a backward, from which they do not wake at once."""


def engine_steps(
    device: Device,
    numel: int,
    cpu_threads: int,
    d2h_bytes_per_second: float,
    paths: Mapping[str, PathSettings],
) -> list[Step]:
    """Half of those that were taken with each size and stride, and with each path alone: the ones around the median of
    what they took.

    Weights are of 16 bits, state is in host memory or on the path. An emulated device is paced as `device` is now.
    d2h_bytes_per_second: of `device`, so that the backward is long enough for the gradients.
    """
    rates = device.rates if isinstance(device, EmulatedDevice) else None
    offload = partial(Offload, device="emulated", emulated=rates) if rates else Offload
    where, each = "cpu" if rates else "cuda", -(-numel // TENSORS)
    weights = [
        torch.nn.Parameter(torch.full((each,), 0.01, dtype=torch.bfloat16, device=where)) for _ in range(TENSORS)
    ]
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    backward = REST_SECONDS + sum(gradient.nbytes for gradient in gradients) / d2h_bytes_per_second
    found: list[Step] = []
    for count, path in product(SUBGROUPS, (None, *paths)):
        settings = partial(offload, subgroup_numel=-(-each * TENSORS // count), cpu_threads=cpu_threads, stride=OFF)
        on_path = {"paths": {path: paths[path]}, "host_cache": 0} if path is not None else {}
        with AdamW(weights, lr=1e-6, offload=settings(**on_path)) as optimizer:
            results: list[StepResult] = []
            optimizer.observers.append(partial(_keep, results))
            for stride in STRIDES if path is None else (OFF,):
                optimizer.apply_knobs(optimizer.knobs.changed({"stride": stride}, specs_for((path,) if path else ())))
                wanted = STEPS if path is None else PATH_STEPS
                steps = [_step(optimizer, weights, gradients, backward, results) for _ in range(SETTLING + wanted)]
                middle = sorted(steps[SETTLING:], key=lambda step: step.returned - step.called)
                found += middle[wanted // 4 : -(wanted // 4)]
    return found


def _keep(results: list[StepResult], result: StepResult, _: StepPhases) -> None:
    results.append(result)


def _step(
    optimizer: AdamW,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    backward_seconds: float,
    results: list[StepResult],
) -> Step:
    """One step. From the moment in which the gradients are there it is as long to `step()` as their copies take, and a
    while more."""
    began = time.monotonic()
    torch.autograd.backward(weights, gradients)  # added up: new memory for each would keep processors busy
    time.sleep(backward_seconds)
    called = time.monotonic()
    optimizer.step()
    returned = time.monotonic()
    return Step(results[-1].plan, results[-1].spans, called, returned, called - began)
