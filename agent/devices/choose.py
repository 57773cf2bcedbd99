"""Which device an optimizer works on: the one its parameters are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.devices.emulated import GRANULE, EmulatedDevice, EmulatedRates
from tidegate.errors import ParameterError


class DeviceSettings(Protocol):
    """What of `Offload` decides about the device."""

    @property
    def device(self) -> str: ...

    @property
    def device_memory_bytes(self) -> int: ...

    @property
    def emulated(self) -> EmulatedRates: ...

    @property
    def subgroup_numel(self) -> int: ...


def choose_device(offload: DeviceSettings, params: Sequence[torch.Tensor]) -> Device:
    """The GPU that `params` are on, or the emulated device for CPU tensors. ParameterError when no one device serves
    them all."""
    places = sorted({str(param.device) for param in params})
    if len(places) > 1:
        raise ParameterError(
            f"Parameters are on {', '.join(places)}: one optimizer works on one device. Build one for each, from the "
            "parameters that are there."
        )
    if places == ["cpu"]:
        return EmulatedDevice(
            offload.device_memory_bytes or _ample_bytes(params, offload.subgroup_numel), offload.emulated
        )
    device = torch.device(places[0])
    if device.type != "cuda":
        raise ParameterError(f"Parameters are on {device}: weights on a CUDA device, or on the CPU, are supported.")
    if offload.device == "emulated":
        raise ParameterError(f"Parameters are on {device}, and device='emulated' is for weights on the CPU.")
    return CudaDevice(TorchCuda(device), offload.device_memory_bytes)


def _ample_bytes(params: Sequence[torch.Tensor], subgroup_numel: int) -> int:
    """Room for weights and gradients twice over, and for the state of all subgroups, however small they are."""
    weights = sum(p.numel() * p.element_size() for p in params)
    numel = sum(p.numel() for p in params)
    subgroups = sum(-(-p.numel() // subgroup_numel) for p in params)
    return 4 * weights + 12 * numel + GRANULE * subgroups + (1 << 20)
