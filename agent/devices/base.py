"""The protocol of a device: memory, copies and updates in order on lanes, and events that other lanes wait for.

A lane of a device is a stream: `copy`, `update` and `norms` enqueue work behind what the lane holds and return an
event at once or when it is done, as the device likes. Nobody may look at the memory before the event says done.

The framework has a stream of its own, on which it makes gradients and reads weights. `now` and `block` tie it to the
lanes, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tidegate.kernels import GradDtype, Scalars, ThreadPool, WeightFormat, adamw_update
from tidegate.wire.base import DeviceKind


@dataclass(frozen=True, slots=True)
class Copy:
    """`nbytes` from address `src` to address `dst`; one of them is on the device."""

    dst: int
    src: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """Consecutive parameters that are updated with the same scalars. All addresses, `aux` 0 when there is none."""

    numel: int
    weight: int
    weight_format: WeightFormat
    aux: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    grad_dtype: GradDtype
    scalars: Scalars

    def apply(self, pool: ThreadPool) -> None:
        """Runs the update on host threads."""
        adamw_update(
            pool, self.numel, self.weight, self.weight_format, self.aux,
            self.exp_avg, self.exp_avg_sq, self.grad, self.grad_dtype, self.scalars,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradRef:
    """The gradient of one parameter on the device."""

    address: int
    numel: int
    dtype: GradDtype


class Event(Protocol):
    """Work that was enqueued on a lane."""

    def wait(self) -> None:
        """Blocks the calling thread until the work is done."""

    def span(self) -> tuple[float, float]:
        """Start and end of the work on the host's monotonic clock, in seconds. Only after `wait`."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """Work that was done when its call returned."""

    start: float
    end: float

    def wait(self) -> None:
        return

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class Device(Protocol):
    """What the engine asks of a device. Sizes in bytes, addresses as integers."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def in_use_bytes(self) -> int: ...

    def take_peak_bytes(self) -> int:
        """Highest `in_use_bytes` since the last call."""

    def alloc(self, nbytes: int) -> int:
        """Device memory; MemoryBudgetError with figures when it does not fit."""

    def free(self, address: int) -> None: ...

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Zeroed host memory that the device copies from and to fastest, as bytes."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts `tensor`, made by the framework, as memory of this device while it lives. Does not keep it alive."""

    def now(self) -> Event:
        """Done when everything that the calling thread has enqueued in the framework so far is done. It has no span."""

    def mark(self) -> Event:
        """As `now`; its span ends when that was."""

    def block(self, event: Event) -> None:
        """What the calling thread enqueues in the framework from now on begins after `event`."""

    def wait(self, lane: str, event: Event) -> None:
        """Work enqueued on `lane` from now on begins after `event`."""

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        """The caller lets `tensor` go: its memory is not given away before what `lane` holds now is done."""

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event: ...

    def update(self, runs: Sequence[UpdateRun]) -> Event: ...

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, list[tuple[float, int]]]:
        """Sum of squares and count of non-finite values of each gradient; the list is valid after the event."""

    def close(self) -> None: ...
