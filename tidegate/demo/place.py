"""Where the demo's model and its batches are: the GPU where there is one, else the CPU with the emulated device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.agent.devices.cuda_problem import cuda_problem


@dataclass(frozen=True)
class Place:
    """`device` of model and batches; `offload`: the optimizer's device, as `tidegate.Offload` takes it."""

    device: torch.device
    offload: str = "auto"
    why_no_gpu: str = ""

    @property
    def name(self) -> str:
        return f"{torch.cuda.get_device_name(self.device)} ({self.device})"


def choose_place(emulated: bool) -> Place:
    """`emulated`: not on the GPU, even where there is one."""
    if emulated:
        return Place(torch.device("cpu"), "emulated", "--emulated was given")
    problem = cuda_problem()
    if problem is not None:
        return Place(torch.device("cpu"), why_no_gpu=f"{problem.reason} (`tidegate doctor --gpu` says what helps)")
    return Place(torch.device("cuda", torch.cuda.current_device()))
