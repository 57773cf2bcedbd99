"""Device interface: memory, copies and updates in order on lanes, and events that other lanes wait for.

A lane of a device is a stream. `copy`, `update` and `norms` enqueue work behind the lane's earlier work and return an
event, either at once or when the work is done, as the device chooses. The memory must not be accessed before the event
is done.

The framework has a stream of its own, on which it computes gradients and reads weights. Lanes wait for the
framework's work by an event that `now` returns; the framework waits for a lane's event by `block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tidegate.kernels import ThreadPool
from tidegate.kernels.arithmetic.device_calls import GradRef as GradRef
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.kernels.dispatch import SquaresTask, Task
from tidegate.wire.base import DeviceKind


class Copy(NamedTuple):
    """Copy of `nbytes` from address `src` to address `dst`; one of them is on the device."""

    dst: int
    src: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class UpdateRun(Update):
    """An `Update` together with the implementation of its rule. `apply` runs the update on host threads."""

    implementation: Implementation

    def apply(self, pool: ThreadPool) -> None:
        """Runs the update on host threads."""
        self.implementation.update(pool, self)


class Waitable(Protocol):
    """Something that a thread can wait for."""

    def wait(self) -> None:
        """Blocks the calling thread until the work is done."""


class Event(Waitable, Protocol):
    """Handle of work that was enqueued on a lane."""

    def span(self) -> tuple[float, float]:
        """Start and end of the work in seconds on the host's monotonic clock. May be called only after `wait`."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """Event of work that is already done when the event is created. `start`, `end`: the span of the work in seconds on
    the host's monotonic clock."""

    start: float
    end: float

    def wait(self) -> None:
        return

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class Device(Protocol):
    """Interface between engine and device. Sizes in bytes, addresses as integers."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def in_use_bytes(self) -> int: ...

    def take_peak_bytes(self) -> int:
        """Highest `in_use_bytes` since the last call."""

    def alloc(self, nbytes: int) -> int:
        """Allocates device memory and returns its address. Raises MemoryBudgetError, with figures, if it does not
        fit."""

    def free(self, address: int) -> None: ...

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates zeroed host memory, as a tensor of bytes, of the kind that is copied fastest from and to the
        device."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts a tensor of the framework as memory of this device until the tensor is freed. Does not keep it
        alive."""

    def now(self) -> Event:
        """Event that is done when all work that the calling thread has enqueued in the framework so far is done. It has
        no span."""

    def mark(self) -> Event:
        """Event that is done when all work that the calling thread has enqueued in the framework so far is done. In
        contrast to the event of `now`, it has a span: both start and end are the time at which that work was done."""

    def block(self, event: Event) -> None:
        """Makes work that the calling thread enqueues in the framework from now on begin after `event`."""

    def wait(self, lane: str, event: Event) -> None:
        """Makes work that is enqueued on `lane` from now on begin after `event`."""

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        """Keeps the memory of `tensor` from being reused before the work that is now enqueued on `lane` is done. To be
        called before `tensor` is dropped."""

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event: ...

    def copy_task(self, lane: str, copies: Callable[[], Sequence[Copy]]) -> Task | None:
        """The same copies as a task that needs no interpreter; None if `copy` must be called. `copies`: function that
        makes the copies; it is only called for a task."""

    def update(self, runs: Sequence[UpdateRun]) -> Event: ...

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, list[tuple[float, int]]]:
        """Computes a pair for each gradient: the sum of squares and the number of non-finite values. Returns an event
        and the list of pairs, which may be read only after the event is done."""

    def norms_task(self, grads: Callable[[], Sequence[GradRef]]) -> SquaresTask | None:
        """The same sums as a task that needs no interpreter; None if `norms` must be called. `grads`: function that
        finds the gradients; it is only called for a task."""

    def close(self) -> None: ...
