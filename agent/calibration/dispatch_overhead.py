"""Measures the fixed costs of ops and steps. The cost of an op (handing it to its lane, waking the lane, recording its
end) is measured with ops that do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch

from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.offload import Offload
from tidegate.plan import Placement, Plan, Subgroup, make_plan
from tidegate.plan.ops import LANES, Op, path_lanes

SUBGROUPS: Final = 24
STEPS: Final = 7
TINY_NUMEL: Final = 64
"""Number of parameters of the step that is measured."""
EARLY_OPS: Final = 1
"""Number of ops of this step that are done before `step()` is called: one, the copy of the gradient."""
SETTLE_SECONDS: Final = 0.01
"""Pause in seconds between backward and `step()`, in which the copy of the gradient ends."""


class _NoOpRunner:
    """Op runner that does nothing."""

    def wait(self, lane: str, event: Event) -> None:
        return

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        now = time.monotonic()
        return IssuedOp(DoneEvent(now, now), 0, 0)


def op_overhead_seconds(paths: Sequence[str]) -> float:
    """Measures the fixed cost of one op in seconds: runs a plan whose ops do nothing, and divides its time by the
    number of ops. Subgroups are updated alternately on the CPU and on the device. paths: names of the paths of the
    plan."""
    plan = _plan(paths)
    lanes = [lane for path in paths for lane in path_lanes(path)]
    executor = Executor(_NoOpRunner(), lanes=(*LANES, *lanes), ahead=lanes)
    try:
        return median(_seconds(executor, plan) for _ in range(STEPS)) / len(plan.ops)
    finally:
        executor.close()


def step_seconds(op_seconds: float) -> float:
    """Measures the fixed cost of a step in seconds: runs a step with very few parameters, and subtracts the fixed costs
    of its ops.

    op_seconds: fixed cost of one op.
    """
    weight = torch.nn.Parameter(torch.zeros(TINY_NUMEL, dtype=torch.bfloat16, device="cpu"))
    gradient = torch.zeros_like(weight)
    durations: list[float] = []
    # The emulated speeds do not matter: only a few bytes are copied.
    settings = Offload(device="emulated", emulated=EmulatedRates(), stride="off")
    with AdamW([weight], offload=settings) as optimizer:
        ops: list[int] = []
        optimizer.observers.append(lambda result, _: ops.append(len(result.spans)))
        for _ in range(STEPS):
            weight.backward(gradient)
            time.sleep(SETTLE_SECONDS)
            began = time.monotonic()
            optimizer.step()
            durations.append(time.monotonic() - began)
            optimizer.zero_grad()
    return max(0.0, median(durations) - (ops[-1] - EARLY_OPS) * op_seconds)


def _seconds(executor: Executor, plan: Plan) -> float:
    """Runs one step of `plan` and returns its duration in seconds."""
    began = time.monotonic()
    executor.start(plan)
    executor.step()
    executor.finish()
    return time.monotonic() - began


def _plan(paths: Sequence[str]) -> Plan:
    """A plan with all kinds of ops: subgroups alternate between CPU and device, and between the paths."""
    subgroups = [Subgroup(i, 1, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(SUBGROUPS)]
    homes = [*paths] or ["host"]
    placements = []
    for i in range(SUBGROUPS):
        home = homes[i // 2 % len(homes)]
        on_cpu = i % 2 == 0
        placements.append(Placement("cpu" if on_cpu else "device", home, home, mirror_valid=on_cpu and home == "host"))
    return make_plan(subgroups, placements, num_slots=2, host_slots=dict.fromkeys(paths, 3))
