"""A training whose knobs can change before each step. Its gradients are given instead of computed, so that only the
update takes time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

import tidegate
from tidegate.agent.control.rank_predictor import rank_of
from tidegate.agent.devices.emulated import EmulatedDevice, EmulatedRates
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import Knobs
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import LANES, OpKind
from tidegate.plan.residency import GradientMode
from tidegate.simulator.steady_state import Rank
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import Span

TENSOR_NUMEL = 1 << 22
STATE_BYTES = 10
"""Bytes of state per parameter: remainder and moments."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured times of one update.

    backward_seconds: time before `step()` in which ops could already run. busy_seconds: busy time during the update of
    each resource: `cpu`, `norm`, `device`, `h2d`, `d2h`, and each path (reads and writes together).
    """

    update_seconds: float
    backward_seconds: float
    busy_seconds: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.busy_seconds, key=lambda name: self.busy_seconds[name])


def mean(steps: Sequence[Measured]) -> Measured:
    """The mean of several consecutive steps."""
    return Measured(
        update_seconds=statistics.fmean(one.update_seconds for one in steps),
        backward_seconds=statistics.fmean(one.backward_seconds for one in steps),
        busy_seconds={
            name: statistics.fmean(one.busy_seconds.get(name, 0.0) for one in steps)
            for name in dict.fromkeys(name for one in steps for name in one.busy_seconds)
        },
    )


def typical_seconds(turns: Sequence[Sequence[Measured]]) -> float:
    """Typical update time in seconds. Each turn is a list of consecutive steps.

    It is the mean of medians: the median of all first steps, the median of all second steps, and so on. So a single
    stall has hardly any influence.
    """
    return statistics.fmean(
        statistics.median(one.update_seconds for one in steps) for steps in zip(*turns, strict=True)
    )


class Training:
    """A training of 16-bit weights with remainders on the emulated device. A context manager."""

    def __init__(
        self,
        *,
        numel: int,
        subgroup_numel: int,
        paths: Mapping[str, PathSettings],
        device: EmulatedRates,
        cpu_threads: int,
        gradients: GradientMode = "keep",
        gradient_memory_bytes: int = 0,
    ) -> None:
        """numel: number of parameters, a multiple of `TENSOR_NUMEL`. gradient_memory_bytes: in mode `release`, device
        memory for gradients; the others are spilled to host memory."""
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
                gradients=gradients,
                gradient_memory_bytes=gradient_memory_bytes,
            ),
        )
        self._optimizer.observers.append(self._observe)
        self._result: StepResult

    def _observe(self, result: StepResult, _: StepPhases) -> None:
        self._result = result

    @property
    def rank(self) -> Rank:
        """The description of this training that the model gets."""
        return rank_of(self._optimizer.engine)

    @property
    def emulated(self) -> EmulatedRates:
        """The rates to which the emulated device is paced. They may be changed."""
        return cast(EmulatedDevice, self._optimizer.device).rates

    def turn(self, knobs: Knobs) -> EffectiveKnobs:
        """Sets the knobs for the next steps. Returns the effective knobs."""
        self._optimizer.check_knobs(knobs)
        self._optimizer.apply_knobs(knobs)
        return self._optimizer.engine.effective

    def step(self, backward_seconds: float) -> Measured:
        """Runs one step whose backward takes `backward_seconds`, during which lanes may fetch and copy.

        New gradients are added to those of earlier steps, because new memory in every step would cost processor time
        for its pages, which a backward on a device does not need.
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
