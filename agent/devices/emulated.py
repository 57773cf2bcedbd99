"""Emulated device: runs the whole engine without a GPU. Its speeds are configured, and are no performance measurement.

Weights and gradients are the framework's CPU tensors, adopted as device memory. State on the device is in an arena, in
which the bytes of newly allocated and of freed blocks are NaN. An op that uses a host address as a device address, or a
device address as a host address, raises: code that would crash on a GPU fails here too.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tidegate.agent.devices.adopted_tensors import AdoptedTensors
from tidegate.agent.devices.base import Copy, DoneEvent, Event, GradRef, UpdateRun
from tidegate.errors import DeviceAccessError, MemoryBudgetError
from tidegate.kernels import ThreadPool, aligned_buffer, copy, fill, sum_of_squares
from tidegate.kernels.dispatch import SquaresTask, Task, copy_task, squares_task
from tidegate.knobs.setting_checks import check_number
from tidegate.plan.ops import D2H, H2D
from tidegate.wire.base import DeviceKind

POISON = 0xFF
"""Value of each byte of a block that is newly allocated or freed. Numbers of these bytes are NaN in fp32, bf16 and
fp16."""

ALIGNMENT = 256
"""Allocations are rounded up to a multiple of this number of bytes."""


@dataclass(kw_only=True)
class EmulatedRates:
    """Speeds of the emulated device. They may be changed during a run, to simulate a slow link.

    h2d_bytes_per_second: copies from the host to the device (bytes a second; default 4e9).
    d2h_bytes_per_second: copies from the device to the host (bytes a second; default 4e9).
    update_params_per_second: updates on the device (parameters a second; default 2e9).

    Raises ConfigError for a speed that is not a number above 0, also when a speed is changed later. With the speed
    `math.inf`, the work is not slowed down.
    """

    h2d_bytes_per_second: float = 4e9
    d2h_bytes_per_second: float = 4e9
    update_params_per_second: float = 2e9

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, check_number(name, value, above=0.0))


class Arena:
    """Simulated device memory with a capacity. Allocation is first-fit. A block is filled with POISON when it is
    allocated and when it is freed."""

    def __init__(self, capacity_bytes: int) -> None:
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device="cpu")
        self.base = self.memory.data_ptr()
        self.capacity_bytes = capacity_bytes
        self.blocks: list[tuple[int, int]] = []
        """Allocated (offset, size), sorted."""
        self.in_use_bytes = 0

    def alloc(self, nbytes: int) -> int | None:
        """Address of a new block; None when there is no gap of this size."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, taken in self.blocks:
            if start - offset >= size:
                break
            offset = start + taken
        if offset + size > self.capacity_bytes:
            return None
        insort(self.blocks, (offset, size))
        self.in_use_bytes += size
        fill(self.base + offset, POISON, size)
        return self.base + offset

    def free(self, address: int) -> None:
        """Frees a block. Raises DeviceAccessError if the block is not allocated."""
        offset = address - self.base
        index = next((i for i, (start, _) in enumerate(self.blocks) if start == offset), None)
        if index is None:
            raise DeviceAccessError(f"Address {address:#x} was not allocated on this device, or is freed already.")
        _, size = self.blocks.pop(index)
        self.in_use_bytes -= size
        fill(address, POISON, size)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one allocated block contains all of the `nbytes` bytes that begin at `address`."""
        offset = address - self.base
        index = bisect_right(self.blocks, (offset, self.capacity_bytes)) - 1
        return index >= 0 and offset + nbytes <= sum(self.blocks[index])

    def covers(self, address: int) -> bool:
        """Whether the address is inside the arena, allocated or not."""
        return self.base <= address < self.base + self.capacity_bytes


class EmulatedDevice:
    """Emulated device: computes on CPU tensors, and slows copies and updates down to the configured rates.
    `capacity_bytes` limits arena and adopted tensors together."""

    kind: DeviceKind = "emulated"

    def __init__(self, capacity_bytes: int, rates: EmulatedRates | None = None) -> None:
        # A copy: changing the rates of one device must not slow down another.
        self.rates = replace(rates or EmulatedRates())
        self.capacity_bytes = capacity_bytes
        self._arena = Arena(capacity_bytes)
        self._adopted = AdoptedTensors()
        self._pool = ThreadPool(1)
        self._peak = 0
        self._lock = threading.Lock()

    @property
    def in_use_bytes(self) -> int:
        return self._arena.in_use_bytes + self._adopted.in_use_bytes

    def take_peak_bytes(self) -> int:
        with self._lock:
            peak, self._peak = self._peak, self._arena.in_use_bytes + self._adopted.recent_bytes()
            return max(peak, self._peak)

    def alloc(self, nbytes: int) -> int:
        with self._lock:
            free = self.capacity_bytes - self.in_use_bytes
            address = self._arena.alloc(nbytes) if nbytes <= free else None
            if address is None:
                raise MemoryBudgetError(
                    f"{nbytes:,} bytes do not fit in device memory: {max(free, 0):,} of {self.capacity_bytes:,} are "
                    "free. Lower static_ratio, use smaller subgroups or fewer slots.",
                    nbytes, free,
                )  # fmt: skip
            self._note_peak()
            return address

    def free(self, address: int) -> None:
        with self._lock:
            self._arena.free(address)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates host memory whose pages belong to this buffer alone, huge pages if available. Transfers from and to
        storage paths are fastest with such memory."""
        return torch.from_numpy(aligned_buffer(max(nbytes, 1)))[:nbytes]

    def adopt(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._adopted.add(tensor)
            self._note_peak()

    def now(self) -> Event:
        moment = time.monotonic()
        return DoneEvent(moment, moment)

    def mark(self) -> Event:
        return self.now()

    def block(self, event: Event) -> None:
        event.wait()

    def wait(self, lane: str, event: Event) -> None:
        event.wait()

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        """Does nothing: copies and updates are done when their calls return."""

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event:
        start = time.monotonic()
        for one in copies:
            self._check_copy(lane, one)
            copy(one.dst, one.src, one.nbytes)
        return self._pace(start, sum(one.nbytes for one in copies) / self._copy_rate(lane))

    def copy_task(self, lane: str, copies: Callable[[], Sequence[Copy]]) -> Task | None:
        made = copies()
        try:
            for one in made:
                self._check_copy(lane, one)
        except DeviceAccessError:
            return None  # `copy` raises it, in the lane
        return copy_task(list(made), self._copy_rate(lane))

    def _copy_rate(self, lane: str) -> float:
        return self.rates.d2h_bytes_per_second if lane == D2H else self.rates.h2d_bytes_per_second

    def update(self, runs: Sequence[UpdateRun]) -> Event:
        start = time.monotonic()
        for run in runs:
            sizes = [tensor.nbytes for tensor in run.implementation.rule.tensors]
            for address, nbytes in (
                (run.weight, run.weight_format.weight_bytes),
                *zip(run.tensors, sizes, strict=True),
                (run.aux, run.weight_format.aux_bytes),
                (run.grad, run.grad_dtype.nbytes),
            ):
                self._require_device(address, nbytes * run.numel, "device")
            run.apply(self._pool)
        return self._pace(start, sum(run.numel for run in runs) / self.rates.update_params_per_second)

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, list[tuple[float, int]]]:
        start = time.monotonic()
        for grad in grads:
            self._require_device(grad.address, grad.dtype.nbytes * grad.numel, "device")
        found = [sum_of_squares(self._pool, g.address, g.numel, g.dtype) for g in grads]
        return DoneEvent(start, time.monotonic()), found

    def norms_task(self, grads: Callable[[], Sequence[GradRef]]) -> SquaresTask | None:
        found = grads()
        try:
            for grad in found:
                self._require_device(grad.address, grad.dtype.nbytes * grad.numel, "device")
        except DeviceAccessError:
            return None  # `norms` raises it, in the lane
        return squares_task(self._pool, [(grad.address, grad.numel, grad.dtype) for grad in found])

    def close(self) -> None:
        self._pool.close()
        self._adopted.clear()

    def _note_peak(self) -> None:
        """Updates the peak of memory in use."""
        # Which tensors live is only checked near the peak: a check for each gradient would be most of the cost of
        # adopting.
        if self._arena.in_use_bytes + self._adopted.most_bytes > self._peak:
            self._peak = max(self._peak, self.in_use_bytes)

    def _pace(self, start: float, seconds: float) -> Event:
        """Sleeps until `seconds` after `start`; returns the event of the finished work."""
        remaining = start + seconds - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        return DoneEvent(start, time.monotonic())

    def _check_copy(self, lane: str, one: Copy) -> None:
        """Raises DeviceAccessError unless one address is on the device and the other one is not."""
        on_device, on_host = (one.dst, one.src) if lane == H2D else (one.src, one.dst)
        self._require_device(on_device, one.nbytes, lane)
        self._require_host(on_host, one.nbytes, lane)

    def _require_device(self, address: int, nbytes: int, lane: str) -> None:
        """Raises DeviceAccessError unless all bytes are on the device. `lane`: name for the message."""
        if not nbytes:
            return
        with self._lock:
            if self._arena.holds(address, nbytes) or self._adopted.holds(address, nbytes):
                return
        raise DeviceAccessError(f"Lane {lane}: {nbytes} bytes at {address:#x} are not (or no longer) on the device.")

    def _require_host(self, address: int, nbytes: int, lane: str) -> None:
        """Raises DeviceAccessError if any of the bytes is on the device. `lane`: name for the message."""
        with self._lock:
            adopted = self._adopted.overlaps(address, nbytes)
        if adopted or self._arena.covers(address):
            raise DeviceAccessError(
                f"Lane {lane}: address {address:#x} is on the device, but a host address is needed."
            )
