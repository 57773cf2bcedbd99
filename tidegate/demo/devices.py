"""The device of the demo's model and batches: the GPU if there is one, else the CPU with the emulated device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.agent.devices.cuda_problem import cuda_problem
from tidegate.agent.optimizer.offload import DeviceChoice


@dataclass(frozen=True)
class DemoDevices:
    """The devices of the demo. `device`: device of model and batches; `offload`: the optimizer's device, as in
    `tidegate.Offload(device=…)`; `why_no_gpu`: the reason if no GPU is used."""

    device: torch.device
    offload: DeviceChoice = "auto"
    why_no_gpu: str = ""

    @property
    def name(self) -> str:
        return f"{torch.cuda.get_device_name(self.device)} ({self.device})"


def choose_devices(emulated: bool) -> DemoDevices:
    """Chooses the devices. `emulated`: use the emulated device, even if there is a GPU."""
    if emulated:
        return DemoDevices(torch.device("cpu"), "emulated", "--emulated was given")
    problem = cuda_problem()
    if problem is not None:
        why = f"{problem.reason} (`tidegate doctor --gpu` says what helps)"
        return DemoDevices(torch.device("cpu"), why_no_gpu=why)
    return DemoDevices(torch.device("cuda", torch.cuda.current_device()))
