"""Workloads with which calibration measures each lane. They run the engine's own operations, in the same kind of memory
as in the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.agent.calibration.lane_rates import Load
from tidegate.agent.devices.base import Copy, Device, GradRef, UpdateRun
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.state_file import StateKind, padded_bytes
from tidegate.agent.tiers.tier_store import FORMAT_NUMBERS
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, aligned_buffer, fill, implementation
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, path_lanes

RULE: Final = implementation("adamw")
"""The update rule that is measured, with bf16 weights and gradients."""
BYTES_PER_PARAM: Final = (2, 2, *(tensor.nbytes for tensor in RULE.rule.tensors), 2)
"""Bytes per parameter: weight, remainder, tensors of the update rule, gradient."""
STATE_BYTES: Final = 2 + RULE.rule.bytes_per_param
"""Bytes per parameter of the stored state: remainder and tensors of the update rule."""
NORM: Final = "norm"
"""Name of the workload of gradient norms. It runs on the device's lane, with a rate of its own."""
IN_FLIGHT: Final = 2
"""Number of ops that are in progress at the same time on a lane of a path. It is the same in the engine, which starts
the next op while one is in progress."""
SMALL: Final = 1 << 16
"""Size of a small op, in bytes or parameters. Such an op takes hardly longer than an op that does nothing."""
_BYTE: Final = 0x3C
"""Byte with which memory is filled. Memory then holds small normal numbers in every format, and each page is
allocated."""


def touched_memory(nbytes: int) -> NDArray[np.uint8]:
    """Allocates memory as the engine does, and writes to every page: pages without a write would share one physical
    page of zeros."""
    memory = aligned_buffer(nbytes)
    fill(memory.ctypes.data, _BYTE, nbytes)
    return memory


def cpu_load(pool: ThreadPool, numel: int) -> Load:
    """Workload of the CPU: updates of `numel` parameters."""
    arrays = [touched_memory(nbytes * numel) for nbytes in BYTES_PER_PARAM]

    def update(count: int) -> float:
        _update_run(count, *(array.ctypes.data for array in arrays)).apply(pool)
        return float(count)

    return Load(CPU, partial(update, numel), partial(update, min(numel, SMALL)))


def device_loads(stack: ExitStack, device: Device, numel: int, piece_bytes: int) -> list[Load]:
    """Workloads of a device: copies of `piece_bytes` in each direction, updates of `numel` parameters, and the
    norm of their gradients. The device memory of the workloads is freed when `stack` is closed."""

    def alloc(nbytes: int) -> int:
        address = device.alloc(nbytes)
        stack.callback(device.free, address)
        return address

    arrays = [alloc(nbytes * numel) for nbytes in BYTES_PER_PARAM]
    _fill(device, arrays, numel)

    def copies(lane: str) -> Load:
        host, there = device.host_buffer(piece_bytes), alloc(piece_bytes)
        host_address = host.data_ptr()
        fill(host_address, _BYTE, piece_bytes)
        one = Copy(there, host_address, piece_bytes) if lane == H2D else Copy(host_address, there, piece_bytes)

        def copy(nbytes: int) -> float:
            assert len(host), "the buffer must live as long as it is copied"
            device.copy(lane, [one._replace(nbytes=nbytes)]).wait()
            return float(nbytes)

        return Load(lane, partial(copy, piece_bytes), partial(copy, min(piece_bytes, SMALL)))

    def update(count: int) -> float:
        device.update([_update_run(count, *arrays)]).wait()
        return float(count)

    def norm() -> float:
        device.norms([GradRef(arrays[-1], numel, GradDtype.BF16)])[0].wait()
        return float(numel)

    updates = Load(DEVICE, partial(update, numel), partial(update, min(numel, SMALL)))
    return [copies(H2D), copies(D2H), updates, Load(NORM, norm)]


def path_loads(stack: ExitStack, path: StoragePath | ObjectPath, op_bytes: int) -> list[Load]:
    """Workloads of a path: fetches and flushes of `op_bytes`, with checksums, and with as many ops in progress at the
    same time as in the engine (IN_FLIGHT). They store test states on the path, which needs the space for these.

    Each workload has pieces of one size only. Smaller pieces would not show the fixed cost of an op: on a path it is
    hidden behind the transfer of the other op that is in progress.
    """
    threads = stack.enter_context(ThreadPoolExecutor(2 * IN_FLIGHT, "tidegate-calibrate"))
    stored = _TestStates(path, threads, op_bytes)
    read, write = path_lanes(path.name)
    return [Load(read, stored.transfers("read")), Load(write, stored.transfers("write"))]


class _TestStates:
    """States with which reads and writes of a path are measured: IN_FLIGHT states that are read, and IN_FLIGHT others
    that are written."""

    def __init__(self, path: StoragePath | ObjectPath, threads: ThreadPoolExecutor, nbytes: int) -> None:
        self._path, self._threads = path, threads
        numel = max(1, nbytes // STATE_BYTES)
        self._nbytes = padded_bytes(numel * STATE_BYTES)
        self._memory = touched_memory(self._nbytes * 2 * IN_FLIGHT)
        self._numbers = range(2 * IN_FLIGHT)
        for number in self._numbers:
            path.make(
                StateKind(RULE.rule.name, 0, number, numel, FORMAT_NUMBERS[WeightFormat.BF16_REMAINDER], STATE_BYTES)
            )
            path.write(number, self._address(number), 0)  # state that was never written would not be read

    def _address(self, number: int) -> int:
        return int(self._memory.ctypes.data) + number * self._nbytes

    def transfers(self, way: Literal["read", "write"]) -> Callable[[], float]:
        """Returns a function that makes one transfer in this direction: each call waits for the end of one transfer,
        while the next one is already in progress, and returns the bytes of a transfer."""
        numbers = self._numbers[:IN_FLIGHT] if way == "read" else self._numbers[IN_FLIGHT:]
        turns, in_flight = cycle(numbers), deque[Future[object]]()

        def once() -> float:
            while len(in_flight) < IN_FLIGHT:
                in_flight.append(self._threads.submit(self._move, way, next(turns)))
            in_flight.popleft().result()
            return float(self._nbytes)

        return once

    def _move(self, way: Literal["read", "write"], number: int) -> object:
        address = self._address(number)
        return self._path.read(number, address) if way == "read" else self._path.write(number, address, 0)


def _fill(device: Device, addresses: Sequence[int], numel: int) -> None:
    """Fills the device memory of the arrays of BYTES_PER_PARAM (at `addresses`, in the same order) with normal
    numbers. Otherwise a GPU might update denormal numbers, and the emulated device NaN."""
    for address, nbytes in zip(addresses, BYTES_PER_PARAM, strict=True):
        host = device.host_buffer(nbytes * numel)
        fill(host.data_ptr(), _BYTE, nbytes * numel)
        device.copy(H2D, [Copy(address, host.data_ptr(), nbytes * numel)]).wait()


def _update_run(numel: int, weight: int, aux: int, *others: int) -> UpdateRun:
    *tensors, grad = others
    values = RULE.scalars(step=3, grad_scale=1.0, **RULE.rule.defaults)
    return UpdateRun(
        numel, weight, WeightFormat.BF16_REMAINDER, aux, tuple(tensors), grad, GradDtype.BF16, values, RULE
    )
