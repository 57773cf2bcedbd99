"""What test_executor runs: the process ends while a lane is inside torch and inside a kernel."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

from tidegate.agent.devices.base import DoneEvent, Event, UpdateRun
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat
from tidegate.kernels.adamw import IMPLEMENTATION
from tidegate.kernels.adamw.scalars import scalars
from tidegate.plan import Placement, Subgroup, make_plan
from tidegate.plan.ops import Op

SECONDS = 0.15
"""That an op takes."""
runs = threading.Event()


class Runner:
    def __init__(self) -> None:
        self.arrays = [torch.zeros(1000) for _ in range(4)]
        self.pool = ThreadPool(1)

    def wait(self, lane: str, event: Event) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        runs.set()
        until = time.monotonic() + SECONDS
        weight, first, second, grad = self.arrays
        settings = scalars(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
        while time.monotonic() < until:
            for _ in range(100):
                weight.as_strided((10, 10), (10, 1))
            UpdateRun(
                1000, weight.data_ptr(), WeightFormat.F32, 0, (first.data_ptr(), second.data_ptr()), grad.data_ptr(),
                GradDtype.F32, settings, IMPLEMENTATION,
            ).apply(self.pool)  # fmt: skip
        print(op.kind, flush=True)
        return IssuedOp(DoneEvent(0.0, 0.0), op.nbytes, op.numel)


executor = Executor(Runner())
plan = make_plan([Subgroup(0, 10, 2, 2, 10)], [Placement("device", "host", "host", False)], num_slots=1)
executor.start(plan)
if sys.argv[1] == "update":
    executor.step()
else:  # a backward
    executor.gradient_ready([0])
print(len(plan.by_id), flush=True)
runs.wait()
