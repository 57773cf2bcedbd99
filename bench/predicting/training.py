"""A training whose knobs change from step to step; gradients are given to it, so that only its update takes time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import tidegate
from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.engine.step_result import StepResult
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import Knobs
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import LANES, OpKind
from tidegate.simulator.steady_state import Rank
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.timeline import Span

TENSOR_NUMEL = 1 << 22
STATE_BYTES = 10
"""Of a parameter: remainder and moments."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One update: its seconds, those before it in which it could already begin, and how long each resource was busy
    in it: `cpu`, `norm`, `device`, `h2d`, `d2h`, and each path both ways together."""

    update_seconds: float
    backward_seconds: float
    busy_seconds: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.busy_seconds, key=lambda name: self.busy_seconds[name])


def mean(steps: Sequence[Measured]) -> Measured:
    """Of steps that follow each other."""
    return Measured(
        update_seconds=statistics.fmean(one.update_seconds for one in steps),
        backward_seconds=statistics.fmean(one.backward_seconds for one in steps),
        busy_seconds={
            name: statistics.fmean(one.busy_seconds.get(name, 0.0) for one in steps)
            for name in dict.fromkeys(name for one in steps for name in one.busy_seconds)
        },
    )


def typical_seconds(turns: Sequence[Sequence[Measured]]) -> float:
    """Of the update, from turns of steps that follow each other: the median of all first steps, of all second ones and
    so on, and the mean of these. A stall, then, moves it no more than one odd figure moves a median."""
    return statistics.fmean(
        statistics.median(one.update_seconds for one in steps) for steps in zip(*turns, strict=True)
    )


class Training:
    """16-bit weights with remainders on the emulated device. A context manager."""

    def __init__(
        self,
        *,
        numel: int,
        subgroup_numel: int,
        paths: Mapping[str, PathSettings],
        device: EmulatedRates,
        cpu_threads: int,
    ) -> None:
        """numel: a multiple of `TENSOR_NUMEL`."""
        generator = torch.Generator().manual_seed(0)
        tensors = numel // TENSOR_NUMEL
        self._params = [
            torch.nn.Parameter(torch.randn(TENSOR_NUMEL, generator=generator).bfloat16()) for _ in range(tensors)
        ]
        self._gradients = [1e-3 * torch.randn(TENSOR_NUMEL, generator=generator).bfloat16() for _ in range(tensors)]
        self._optimizer = tidegate.AdamW(
            self._params,
            lr=1e-4,
            offload=tidegate.Offload(
                device="emulated",
                emulated=device,
                subgroup_numel=subgroup_numel,
                cpu_threads=cpu_threads,
                host_cache=0 if paths else "auto",
                paths=paths,
            ),
        )
        self._optimizer.observers.append(self._observe)
        self._result: StepResult

    def _observe(self, result: StepResult, _: StepPhases) -> None:
        self._result = result

    @property
    def rank(self) -> Rank:
        """What the model is told of it."""
        engine = self._optimizer.engine
        return Rank(
            engine.subgroups, engine.num_slots, engine.host_slots, engine.gradients.mode,
            gradient_order=engine.gradient_gates.order, step_at=engine.planner.step_at,
            path_speeds=engine.planner.path_speeds,
        )  # fmt: skip

    @property
    def emulated(self) -> EmulatedRates:
        """What its device is paced to. May be changed."""
        return self._optimizer.device.rates

    def turn(self, knobs: Knobs) -> EffectiveKnobs:
        """These knobs from the next step on."""
        self._optimizer.check_knobs(knobs)
        self._optimizer.apply_knobs(knobs)
        return self._optimizer.engine.effective

    def step(self, backward_seconds: float) -> Measured:
        """One step after a backward that takes so long; lanes may fetch and copy in it.

        Gradients are added to those of the steps before: new memory for each would keep the processors busy with its
        pages, which no backward on a device does.
        """
        began = time.monotonic()
        torch.autograd.backward(self._params, self._gradients)
        time.sleep(max(0.0, began + backward_seconds - time.monotonic()))
        called = time.monotonic()
        self._optimizer.step()
        ended = time.monotonic()
        result = self._result
        return Measured(
            update_seconds=ended - called, backward_seconds=called - began, busy_seconds=_busy(result, called, ended)
        )

    def close(self) -> None:
        self._optimizer.close()


def _busy(result: StepResult, start: float, end: float) -> dict[str, float]:
    by_resource: dict[str, list[Span]] = {}
    for span in result.spans:
        # The emulated device sums squares with the CPU's kernel, and paces nothing there.
        name = "norm" if span.kind is OpKind.NORM else span.lane if span.lane in LANES else span.lane.rpartition(":")[0]
        by_resource.setdefault(name, []).append(span)
    return {name: busy_seconds(spans, (start, end)) for name, spans in by_resource.items()}
