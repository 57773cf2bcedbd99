"""What test_executor runs: nobody but a lane's thread has an executor with many tensors, and the process ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.plan import Placement, Subgroup, make_plan
from tidegate.plan.ops import Op

runs, ends = threading.Event(), threading.Event()


class Runner:
    def __init__(self) -> None:
        self.tensors = [torch.from_numpy(np.zeros(1, np.float32)) for _ in range(100_000)]

    def wait(self, lane: str, event: Event) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        runs.set()
        ends.wait()
        return IssuedOp(DoneEvent(0.0, 0.0), op.nbytes, op.numel)


executor = Executor(Runner())
executor.start(make_plan([Subgroup(0, 10, 2, 2, 10)], [Placement("device", "host", "host", False)], num_slots=1))
executor.step()
runs.wait()
del executor
ends.set()
time.sleep(float(sys.argv[1]))
