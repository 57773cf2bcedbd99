"""What each lane does while it is calibrated: as the engine does it, in memory like the engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
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
from tidegate.agent.tiers.tier_store import FORMATS, RULE
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, aligned_buffer, fill, scalars
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, path_lanes

BYTES_PER_PARAM: Final = (2, 2, 4, 4, 2)
"""Weight, remainder, two moments, gradient."""
STATE_BYTES: Final = 10
"""Of these, what is stored."""
NORM: Final = "norm"
"""Called so beside the lanes: it runs on that of the device, at a speed of its own."""
IN_FLIGHT: Final = 2
"""Ops of a path's lane: the engine hands over the next while one is in progress."""
FEW: Final = 1 << 16
"""Bytes, or parameters, of an op that takes hardly longer than one of nothing."""
_BYTE: Final = 0x3C
"""Filled with it, memory holds small normal numbers of every format, and every page of it exists."""


def touched(nbytes: int) -> NDArray[np.uint8]:
    """Memory like the engine's, each page of its own: pages of zeros that nobody has written are one page."""
    memory = aligned_buffer(nbytes)
    fill(memory.ctypes.data, _BYTE, nbytes)
    return memory


def cpu_load(pool: ThreadPool, numel: int) -> Load:
    """Updates `numel` parameters at a time on the CPU."""
    arrays = [touched(nbytes * numel) for nbytes in BYTES_PER_PARAM]

    def some(count: int) -> float:
        _run(count, *(array.ctypes.data for array in arrays)).apply(pool)
        return float(count)

    return Load(CPU, partial(some, numel), partial(some, min(numel, FEW)))


def device_loads(stack: ExitStack, device: Device, numel: int, piece_bytes: int) -> list[Load]:
    """Copies of `piece_bytes` each way, updates of `numel` parameters, and their norm. `stack` gives memory back."""

    def alloc(nbytes: int) -> int:
        address = device.alloc(nbytes)
        stack.callback(device.free, address)
        return address

    weight, remainder, exp_avg, exp_avg_sq, grad = (alloc(nbytes * numel) for nbytes in BYTES_PER_PARAM)
    _fill(device, (weight, remainder, exp_avg, exp_avg_sq, grad), numel)

    def copies(lane: str) -> Load:
        host, there = device.host_buffer(piece_bytes), alloc(piece_bytes)
        near = host.data_ptr()
        fill(near, _BYTE, piece_bytes)
        one = Copy(there, near, piece_bytes) if lane == H2D else Copy(near, there, piece_bytes)

        def some(nbytes: int) -> float:
            assert len(host), "it lives as long as it is copied"
            device.copy(lane, [replace(one, nbytes=nbytes)]).wait()
            return float(nbytes)

        return Load(lane, partial(some, piece_bytes), partial(some, min(piece_bytes, FEW)))

    def update(count: int) -> float:
        device.update([_run(count, weight, remainder, exp_avg, exp_avg_sq, grad)]).wait()
        return float(count)

    def norm() -> float:
        device.norms([GradRef(grad, numel, GradDtype.BF16)])[0].wait()
        return float(numel)

    updates = Load(DEVICE, partial(update, numel), partial(update, min(numel, FEW)))
    return [copies(H2D), copies(D2H), updates, Load(NORM, norm)]


def path_loads(stack: ExitStack, path: StoragePath | ObjectPath, op_bytes: int) -> list[Load]:
    """Fetches and flushes of `op_bytes`, checksums included, as many in flight as in the engine. Takes space.

    There are none of another size: with two in flight, what one costs hides behind what the other moves.
    """
    threads = stack.enter_context(ThreadPoolExecutor(2 * IN_FLIGHT, "tidegate-calibrate"))
    stored = _Stored(path, threads, op_bytes)
    read, write = path_lanes(path.name)
    return [Load(read, stored.moves("read")), Load(write, stored.moves("write"))]


class _Stored:
    """States on a path, some to be read and as many to be written."""

    def __init__(self, path: StoragePath | ObjectPath, threads: ThreadPoolExecutor, nbytes: int) -> None:
        self._path, self._threads = path, threads
        numel = max(1, nbytes // STATE_BYTES)
        self._nbytes = padded_bytes(numel * STATE_BYTES)
        self._memory = touched(self._nbytes * 2 * IN_FLIGHT)
        self._numbers = range(2 * IN_FLIGHT)
        for number in self._numbers:
            path.make(StateKind(RULE, 0, number, numel, FORMATS[WeightFormat.BF16_REMAINDER], STATE_BYTES))
            path.write(number, self._address(number), 0)  # what was never written is not read

    def _address(self, number: int) -> int:
        return int(self._memory.ctypes.data) + number * self._nbytes

    def moves(self, way: Literal["read", "write"]) -> Callable[[], float]:
        """Waits for one of those that are moved this way, while the next is in progress."""
        mine = self._numbers[:IN_FLIGHT] if way == "read" else self._numbers[IN_FLIGHT:]
        turns, in_flight = cycle(mine), deque[Future[object]]()

        def once() -> float:
            while len(in_flight) < IN_FLIGHT:
                in_flight.append(self._threads.submit(self._move, way, next(turns)))
            in_flight.popleft().result()
            return float(self._nbytes)

        return once

    def _move(self, way: Literal["read", "write"], number: int) -> object:
        address = self._address(number)
        return self._path.read(number, address) if way == "read" else self._path.write(number, address, 0)


def _fill(device: Device, places: Sequence[int], numel: int) -> None:
    """Device memory with numbers: what a GPU updates may be denormal otherwise, and the emulated one's is NaN."""
    for place, nbytes in zip(places, BYTES_PER_PARAM, strict=True):
        host = device.host_buffer(nbytes * numel)
        fill(host.data_ptr(), _BYTE, nbytes * numel)
        device.copy(H2D, [Copy(place, host.data_ptr(), nbytes * numel)]).wait()


def _run(numel: int, weight: int, aux: int, exp_avg: int, exp_avg_sq: int, grad: int) -> UpdateRun:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3)
    return UpdateRun(numel, weight, WeightFormat.BF16_REMAINDER, aux, exp_avg, exp_avg_sq, grad, GradDtype.BF16, values)
