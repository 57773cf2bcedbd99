"""Runs real engine steps on a device for the calibration, with two subgroup sizes, each with updates on the CPU alone
and with updates on CPU and device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Final

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import OFF, specs_for
from tidegate.simulator.calibration_fit import MeasuredStep
from tidegate.timeline.step_result import StepPhases, StepResult

TENSORS: Final = 8
"""Number of parameter tensors: their gradients arrive one after the other, and copies begin with the first."""
SUBGROUPS: Final = (4, 16)
"""Numbers of subgroups with which steps are run."""
STRIDES: Final = (OFF, 4.0)
STEPS, PATH_STEPS = 8, 4
"""Numbers of steps: STEPS for each subgroup size and stride with state in host memory, PATH_STEPS for each subgroup
size with state on a path. Only half of the steps are used, those with durations around the median."""
WARMUP_STEPS: Final = 2
"""Steps after each change of knobs that are not counted."""
REST_SECONDS: Final = 0.1
"""Pause in seconds between the last copy of a gradient and `step()`. In the pause the copies end, so that they do not
overlap the update, and the CPU cores go idle as in a real backward, after which they need time to wake."""


def engine_steps(
    device: Device,
    numel: int,
    cpu_threads: int,
    d2h_bytes_per_second: float,
    paths: Mapping[str, PathSettings],
) -> list[MeasuredStep]:
    """Runs steps with each subgroup size, and returns half of them: those with durations around the median.

    Weights have 16 bits. Without `paths`, the state is in host memory and each stride is used; otherwise it is on one
    path after the other, and all updates are on the CPU. If `device` is emulated, the steps use its present rates.

    d2h_bytes_per_second: rate of copies from `device`. It determines the length of the simulated backward, which must
    be long enough to copy the gradients.
    """
    rates = device.rates if isinstance(device, EmulatedDevice) else None
    offload = partial(Offload, device="emulated", emulated=rates) if rates else Offload
    where, each = "cpu" if rates else "cuda", -(-numel // TENSORS)
    weights = [
        torch.nn.Parameter(torch.full((each,), 0.01, dtype=torch.bfloat16, device=where)) for _ in range(TENSORS)
    ]
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    backward = REST_SECONDS + sum(gradient.nbytes for gradient in gradients) / d2h_bytes_per_second
    found: list[MeasuredStep] = []
    for count, path in product(SUBGROUPS, tuple(paths) or (None,)):
        settings = partial(offload, subgroup_numel=-(-each * TENSORS // count), cpu_threads=cpu_threads, stride=OFF)
        on_path = {"paths": {path: paths[path]}, "host_cache": 0} if path is not None else {}
        with AdamW(weights, lr=1e-6, offload=settings(**on_path)) as optimizer:
            results: list[StepResult] = []
            optimizer.observers.append(partial(_collect, results))
            for stride in STRIDES if path is None else (OFF,):
                optimizer.apply_knobs(optimizer.knobs.changed({"stride": stride}, specs_for((path,) if path else ())))
                wanted = STEPS if path is None else PATH_STEPS
                steps = [_step(optimizer, weights, gradients, backward, results) for _ in range(WARMUP_STEPS + wanted)]
                middle = sorted(steps[WARMUP_STEPS:], key=lambda step: step.returned - step.called)
                found += middle[wanted // 4 : -(wanted // 4)]
    return found


def _collect(results: list[StepResult], result: StepResult, _: StepPhases) -> None:
    """Observer that stores the result of each step."""
    results.append(result)


def _step(
    optimizer: AdamW,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    backward_seconds: float,
    results: list[StepResult],
) -> MeasuredStep:
    """Runs one step. `backward_seconds`: pause between the arrival of the gradients and `step()`, long enough for their
    copies and REST_SECONDS."""
    began = time.monotonic()
    torch.autograd.backward(weights, gradients)  # accumulated: allocating new gradients would keep cores busy
    time.sleep(backward_seconds)
    called = time.monotonic()
    optimizer.step()
    returned = time.monotonic()
    return MeasuredStep(results[-1].plan, results[-1].spans, called, returned, called - began)
