"""A training in which only the update takes time: gradients are given, and the backward only waits for a given time.

On a GPU, weights and copies are real. Otherwise the device is emulated and slowed down to stated rates.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import tidegate
from tidegate.agent.control.tuning import update_seconds
from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.plan.ops import Op
from tidegate.timeline.step_result import StepPhases, StepResult

PARAMS = 8


class Given(torch.autograd.Function):
    """Autograd function for a loss whose backward waits, and then returns given gradients."""

    @staticmethod
    def forward(ctx: Any, seconds: float, gradients: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return (None, None, *ctx.gradients)


class Training:
    """A training with bf16 weights and fp32 moments. `step()` returns the seconds of the update."""

    def __init__(self, numel: int, subgroups: int, backward_seconds: float = 0.02, **offload: Any) -> None:
        where = "cuda" if torch.cuda.is_available() and offload.get("device") != "emulated" else "cpu"
        each = numel // PARAMS
        self.params = [torch.nn.Parameter(torch.zeros(each, dtype=torch.bfloat16, device=where)) for _ in range(PARAMS)]
        self._gradients = [torch.full_like(param, 1e-3) for param in self.params]
        self._backward_seconds = backward_seconds
        self._seconds: list[float] = []
        self.optimizer = tidegate.AdamW(
            self.params, lr=1e-3, offload=tidegate.Offload(subgroup_numel=-(-each * PARAMS // subgroups), **offload)
        )
        self.optimizer.observers.append(self._note)

    def pace_cpu(self, params_per_second: float) -> None:
        """Slows the CPU update down to this rate, so that other load on the machine changes its time less. The lanes of
        an emulated device are slowed down in the same way.

        For this, the bench replaces the engine's function for CPU updates by a wrapper that waits, and lets no update
        on the CPU run without it, as a task.
        """
        runner, preparer = self.optimizer.engine._runner, self.optimizer.engine._preparer
        update = runner._cpu_update

        def paced(op: Op) -> IssuedOp:
            began = time.monotonic()
            issued = update(op)
            time.sleep(max(0.0, began + op.numel / params_per_second - time.monotonic()))
            return issued._replace(event=DoneEvent(began, time.monotonic()))

        runner._cpu_update = paced  # type: ignore[method-assign]
        preparer._update = lambda _: None  # type: ignore[method-assign]

    def _note(self, result: StepResult, phases: StepPhases) -> None:
        seconds = update_seconds(result, phases)
        if seconds is not None:
            self._seconds.append(seconds)

    def step(self) -> float:
        loss = Given.apply(self._backward_seconds, self._gradients, *self.params)  # type: ignore[no-untyped-call]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._seconds[-1]

    @property
    def device(self) -> str:
        if self.optimizer.device.kind == "cuda":
            return torch.cuda.get_device_name()
        return "emulated"

    def close(self) -> None:
        self.optimizer.close()
