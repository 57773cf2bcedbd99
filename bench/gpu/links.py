"""Stage: description of this machine, and the speeds of its resources: copies in each direction alone and in both at
the same time, updates on GPU and CPU."""

from __future__ import annotations

import os
import platform
import threading
import time
from typing import Any

import torch

from bench.gpu.target import Target, run_stage, spread
from tidegate.agent.devices.base import Copy, Device, UpdateRun
from tidegate.agent.devices.selection import choose_device
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, instruction_set
from tidegate.kernels.adamw import IMPLEMENTATION
from tidegate.kernels.adamw.scalars import scalars
from tidegate.plan.ops import D2H, DEVICE, H2D

ROUNDS = 7


def environment(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "cpus": len(os.sched_getaffinity(0)),
        "instruction_set": instruction_set(),
    }  # fmt: skip
    if not target.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def link(device: Device, lanes: list[str], nbytes: int) -> dict[str, dict[str, float]]:
    """Bytes per second of each of these lanes while all of them copy. Only copies that fully overlap with the other
    lanes are counted."""
    buffers = {lane: device.host_buffer(nbytes) for lane in lanes}
    places = {lane: device.alloc(nbytes) for lane in lanes}
    rates: dict[str, list[float]] = {}
    gate = threading.Barrier(len(lanes))
    for lane in lanes:
        device.wait(lane, device.now())

    def work(lane: str) -> None:
        host, there = buffers[lane].data_ptr(), places[lane]
        copy = Copy(there, host, nbytes) if lane == H2D else Copy(host, there, nbytes)
        gate.wait()
        events = [device.copy(lane, [copy]) for _ in range(ROUNDS + 2)]
        for event in events:
            event.wait()
        # The first and the last may run while the other lane does not.
        rates[lane] = [nbytes / (end - start) for start, end in (event.span() for event in events[1:-1])]

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in places.values():
        device.free(place)
    return {lane: spread(rates[lane]) for lane in lanes}


def _run(numel: int, weight: int, aux: int, exp_avg: int, exp_avg_sq: int, grad: int) -> UpdateRun:
    values, moments = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3), (exp_avg, exp_avg_sq)
    return UpdateRun(
        numel, weight, WeightFormat.BF16_REMAINDER, aux, moments, grad, GradDtype.BF16, values, IMPLEMENTATION
    )


def device_update(device: Device, numel: int) -> dict[str, float]:
    """Parameters per second of the update on the device, for bf16 weights with remainder."""
    places = [device.alloc(nbytes * numel) for nbytes in (2, 2, 4, 4, 2)]
    device.wait(DEVICE, device.now())
    run = _run(numel, *places)
    device.update([run]).wait()
    events = [device.update([run]) for _ in range(ROUNDS)]
    for event in events:
        event.wait()
    for place in places:
        device.free(place)
    return spread([numel / (end - start) for start, end in (event.span() for event in events)])


def cpu_update(numel: int) -> dict[str, float]:
    places = [torch.zeros(nbytes * numel, dtype=torch.uint8) for nbytes in (2, 2, 4, 4, 2)]
    seconds = []
    with ThreadPool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        for _ in range(ROUNDS):
            start = time.monotonic()
            _run(numel, *(place.data_ptr() for place in places)).apply(pool)
            seconds.append(time.monotonic() - start)
    return spread([numel / taken for taken in seconds[1:]])


def stage(target: Target) -> dict[str, Any]:
    nbytes, numel = target.sized(1 << 30, 1 << 16), target.sized(200_000_000, 50_000)
    settings = target.offload(device_memory_bytes=target.sized(0, 1 << 22))
    device = choose_device(settings, [torch.zeros(1).to(target.device)], IMPLEMENTATION)
    both = link(device, [H2D, D2H], nbytes)
    measured = {
        "environment": environment(target),
        "bytes": nbytes,
        "alone": link(device, [H2D], nbytes) | link(device, [D2H], nbytes),
        "both_at_once": both,
        "device_update_params_per_second": device_update(device, numel),
        "cpu_update_params_per_second": cpu_update(numel),
    }
    device.close()
    return measured


if __name__ == "__main__":
    run_stage(stage)
