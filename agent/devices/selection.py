"""Chooses the device of an optimizer, CUDA or emulated, from the location of its parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.devices.emulated import ALIGNMENT, EmulatedDevice, EmulatedRates
from tidegate.errors import ParameterError
from tidegate.kernels import WeightFormat
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.logs import configure_from_environment, event

log = logging.getLogger("tidegate.devices")

NUM_STREAMS: Final = 4
"""Number of streams: the engine's three lanes, and the framework's stream."""
QUEUES_VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"

EMULATED: Final = "emulated"
"""Entry in `_warned` for the warning about the emulated device."""

_warned: set[str] = set()
"""Warnings that were logged already, so that none is logged twice: EMULATED, and values of the environment variable
CUDA_DEVICE_MAX_CONNECTIONS."""


class DeviceSettings(Protocol):
    """Fields of `Offload` that choose the device."""

    @property
    def device(self) -> str: ...

    @property
    def device_memory_bytes(self) -> int: ...

    @property
    def emulated(self) -> EmulatedRates: ...

    @property
    def subgroup_numel(self) -> int: ...


def choose_device(offload: DeviceSettings, params: Sequence[torch.Tensor], rule: Implementation) -> Device:
    """Returns the GPU that `params` are on, with the kernels of `rule`, or an emulated device for CPU tensors. Raises
    ParameterError if the parameters are not all on one supported device."""
    where = check_one_device(params)
    if where == "cpu":
        capacity = offload.device_memory_bytes or _default_capacity_bytes(params, offload.subgroup_numel, rule)
        return EmulatedDevice(capacity, offload.emulated)
    device = torch.device(where)
    if device.type != "cuda":
        raise ParameterError(f"Parameters are on {device}: weights on a CUDA device, or on the CPU, are supported.")
    if offload.device == "emulated":
        raise ParameterError(
            f"Parameters are on {device}, but device='emulated' is for weights on the CPU: leave out device, or move "
            "the model to the CPU."
        )
    _warn_of_few_queues()
    return CudaDevice(TorchCuda(device, rule=rule), offload.device_memory_bytes)


def warn_if_emulated(device: Device) -> None:
    """Logs a warning for the emulated device, once in a process, so that its measurements are not mistaken for those of
    a GPU."""
    if device.kind == "emulated" and EMULATED not in _warned:
        _warned.add(EMULATED)
        configure_from_environment()
        log.warning(
            "the weights are on the CPU: the device is emulated, its copies and updates are paced to stated rates, and "
            "its measurements say nothing about a GPU (move the model to a GPU before the first step to train there)",
            extra=event("emulated"),
        )


def check_one_device(params: Sequence[torch.Tensor]) -> str:
    """Returns the name of the device of all `params`. Raises ParameterError if they are on several devices."""
    devices = sorted({str(param.device) for param in params})
    if len(devices) > 1:
        raise ParameterError(
            f"Parameters are on {', '.join(devices)}: one optimizer works on one device. Build one optimizer for "
            "each device, from the parameters on that device."
        )
    return devices[0]


def _warn_of_few_queues() -> None:
    """Logs a warning about a low value of the variable CUDA_DEVICE_MAX_CONNECTIONS, once for each value. CUDA reads the
    variable when the process first uses the GPU: a later change has no effect."""
    value = os.environ.get(QUEUES_VARIABLE, "").strip()
    if not value.isdecimal() or not 0 < int(value) < NUM_STREAMS or value in _warned:
        return
    _warned.add(value)
    log.warning(
        "%s=%s: the streams of the process share this number of GPU queues (8 by default), and work waits for "
        "unrelated work of other streams. Copies and updates of Tidegate then overlap little with the backward and "
        "with each other. Unset it, or set it to 8 or more, before the process first uses the GPU, unless the "
        "framework needs it (Megatron's overlap of tensor parallelism does).",
        QUEUES_VARIABLE, value,
    )  # fmt: skip


def _default_capacity_bytes(params: Sequence[torch.Tensor], subgroup_numel: int, rule: Implementation) -> int:
    """Default capacity of the emulated device in bytes: twice the weights and gradients, plus the state of all
    subgroups, plus an allowance for rounding up the size of each allocation."""
    weights = sum(p.numel() * p.element_size() for p in params)
    numel = sum(p.numel() for p in params)
    state_bytes = rule.rule.bytes_per_param + max(form.aux_bytes for form in WeightFormat)
    subgroups = sum(-(-p.numel() // subgroup_numel) for p in params)
    return 4 * weights + state_bytes * numel + ALIGNMENT * subgroups + (1 << 20)
