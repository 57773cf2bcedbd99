"""What each lane does while it is calibrated: as the engine does it, in memory like the engine's, on nothing's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.agent.calibrate_rates import Load
from tidegate.agent.devices.base import Copy, Device, GradRef, UpdateRun
from tidegate.agent.tiers.format import StateKind, padded_bytes
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.path import StoragePath
from tidegate.agent.tiers.store import FORMATS, RULE
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

    def once() -> float:
        _run(numel, *(array.ctypes.data for array in arrays)).apply(pool)
        return float(numel)

    return Load(CPU, once)


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

        def once() -> float:
            assert len(host), "it lives as long as it is copied"
            device.copy(lane, [one]).wait()
            return float(piece_bytes)

        return Load(lane, once)

    def update() -> float:
        device.update([_run(numel, weight, remainder, exp_avg, exp_avg_sq, grad)]).wait()
        return float(numel)

    def norm() -> float:
        device.norms([GradRef(grad, numel, GradDtype.BF16)])[0].wait()
        return float(numel)

    return [copies(H2D), copies(D2H), Load(DEVICE, update), Load(NORM, norm)]


def path_loads(stack: ExitStack, path: StoragePath | ObjectPath, op_bytes: int) -> list[Load]:
    """Fetches and flushes of `op_bytes`, checksums included, as many in flight as in the engine. Takes space."""
    numel = max(1, op_bytes // STATE_BYTES)
    kinds = [
        StateKind(RULE, 0, number, numel, FORMATS[WeightFormat.BF16_REMAINDER], STATE_BYTES)
        for number in range(2 * IN_FLIGHT)
    ]
    memory = touched(padded_bytes(numel * STATE_BYTES) * len(kinds))
    addresses = [memory.ctypes.data + i * (len(memory) // len(kinds)) for i in range(len(kinds))]
    for kind, address in zip(kinds, addresses, strict=True):
        path.make(kind)
        path.write(kind.subgroup, address, 0)  # what was never written is not read
    threads = stack.enter_context(ThreadPoolExecutor(2 * IN_FLIGHT, "tidegate-calibrate"))
    nbytes = float(len(memory) // len(kinds))

    def moves(lane: str, subgroups: Sequence[int], move: Callable[[int], object]) -> Load:
        in_flight: deque[Future[object]] = deque()
        turns = _again_and_again(subgroups)

        def once() -> float:
            assert len(memory), "it lives as long as it is moved"
            while len(in_flight) < IN_FLIGHT:
                in_flight.append(threads.submit(move, next(turns)))
            in_flight.popleft().result()
            return nbytes

        return Load(lane, once)

    read, write = path_lanes(path.name)
    return [
        moves(read, range(IN_FLIGHT), lambda s: path.read(s, addresses[s])),
        moves(write, range(IN_FLIGHT, 2 * IN_FLIGHT), lambda s: path.write(s, addresses[s], 0)),
    ]


def _again_and_again(numbers: Sequence[int]) -> Iterator[int]:
    while True:
        yield from numbers


def _fill(device: Device, places: Sequence[int], numel: int) -> None:
    """Device memory with numbers: what a GPU updates may be denormal otherwise, and the emulated one's is NaN."""
    for place, nbytes in zip(places, BYTES_PER_PARAM, strict=True):
        host = device.host_buffer(nbytes * numel)
        fill(host.data_ptr(), _BYTE, nbytes * numel)
        device.copy(H2D, [Copy(place, host.data_ptr(), nbytes * numel)]).wait()


def _run(numel: int, weight: int, aux: int, exp_avg: int, exp_avg_sq: int, grad: int) -> UpdateRun:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3)
    return UpdateRun(numel, weight, WeightFormat.BF16_REMAINDER, aux, exp_avg, exp_avg_sq, grad, GradDtype.BF16, values)
