"""Calibration of this machine: measures each lane alone, then lanes together. Hardware that is missing is not
emulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import torch

from tidegate.agent.calibration.dispatch_overhead import op_overhead_seconds, step_seconds
from tidegate.agent.calibration.hardware import (
    PathLike,
    hardware,
    last_level_cache_bytes,
    settings_of,
)
from tidegate.agent.calibration.lane_loads import BYTES_PER_PARAM, NORM, STATE_BYTES, cpu_load, device_loads, path_loads
from tidegate.agent.calibration.lane_rates import LaneThroughput, Load, MeasurementRound, measure, medians, rate
from tidegate.agent.calibration.step_timing import engine_steps
from tidegate.agent.cgroups import host_available_bytes, usable_cpus
from tidegate.agent.devices.base import Device
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.ranks import cpu_lane_threads
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import ConfigError, PathFull
from tidegate.kernels import ThreadPool
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, path_lanes
from tidegate.simulator.calibration_fit import MeasuredStep, fitted_card
from tidegate.speeds.rate_card import PathRates, RateCard
from tidegate.speeds.saved_calibration import Calibration

NUMEL: Final = 16_000_000
"""Number of parameters of the measured update, unless the last-level cache is large."""
CACHE_MULTIPLE: Final = 4
"""How many times as large as the last-level cache the memory of the update on the CPU is. Otherwise the update would
find a part of its state in the cache, and be faster than in training."""
OP_BYTES: Final = 16 << 20
"""Bytes of each copy, fetch and flush, except for copies of a GPU."""
GPU_NUMEL: Final = 100_000_000
"""Number of parameters of the measured update on a GPU."""
GPU_OP_BYTES: Final = 256 << 20
"""Bytes of each copy of a GPU. On PCIe 5 a copy of OP_BYTES takes 0.3 ms, hardly longer than to enqueue it and to wait
for it, so that its speed would be measured too low. An op on the state of 100 million parameters copies 1 GB."""
GPU_STEP_NUMEL: Final = 200_000_000
"""Number of parameters of the steps that an engine makes on a GPU. A GPU updates 10 million parameters in less than
0.1 ms, the time that it takes to enqueue the update. With subgroups of that size updates would be measured too slow."""
GPU_SHARE: Final = 8
"""What is measured on a GPU uses at most one part in so many of the GPU's free memory, and of host memory."""
SECONDS: Final = 0.15
"""Seconds of each measurement. With one GPU and two paths a round has about forty measurements."""
ROUNDS: Final = 3
"""Number of rounds. The results are medians over the rounds, because other processes may disturb a single round."""
Progress = Callable[[str], None]
"""Callback that receives the name of the next measurement."""


def calibrate(
    paths: Mapping[str, PathLike] | None = None,
    *,
    device: Device | None = None,
    cpu_threads: int = 0,
    seconds: float = SECONDS,
    numel: int = 0,
    op_bytes: int = OP_BYTES,
    rounds: int = ROUNDS,
    progress: Progress = lambda _: None,
    after_round: Callable[[], None] = lambda: None,
) -> Calibration:
    """Measures CPU and paths, and the GPU if there is one. Hardware that is missing gets no rate, and is not emulated.

    paths: directory or settings of each path, by name.
    device: device that is measured instead of the GPU. If it is emulated, keep its rate card apart from those of real
        hardware.
    cpu_threads: threads of the update on the CPU; 0 for all cores except one for the training thread of each
        rank on the host.
    seconds: duration of each measurement.
    numel: number of parameters of the measured update on the CPU; 0: NUMEL, or more, so that
        the update needs CACHE_MULTIPLE times the memory of the last-level cache, as far as host memory allows. Updates
        on an emulated device and steps with a path have at most NUMEL, updates on a GPU up to GPU_NUMEL, and steps on a
        GPU up to GPU_STEP_NUMEL.
    op_bytes: bytes of each copy, fetch and flush; of copies of a GPU up to GPU_OP_BYTES. Four times as many are stored
        on each path and, with a device, the state of up to NUMEL parameters.
    rounds: number of rounds, of which medians are taken.
    progress: called with the name of the next measurement.
    after_round: called after each round. What it measures has met the same load of the machine.

    Raises ConfigError if host memory does not suffice or a path is an address of an object store, and PathUnusable or
    PathFull for a directory that cannot hold the state.
    """
    numel = numel or _numel_beyond_caches()
    bounded_numel = min(numel, NUMEL)
    needed = 5 * sum(BYTES_PER_PARAM) * numel + 4 * op_bytes * (1 + len(paths or {}))
    if needed > host_available_bytes():
        raise ConfigError(
            f"Calibration needs {needed:,} bytes of host memory, and {host_available_bytes():,} bytes are available: "
            f"free some, or lower numel={numel:,}."
        )
    threads = cpu_threads or cpu_lane_threads()
    settings = {name: settings_of(path) for name, path in (paths or {}).items()}
    with ExitStack() as stack:
        by_threads = _cpu_rates_by_threads(numel, seconds, threads, progress)
        loads = [cpu_load(stack.enter_context(ThreadPool(threads)), numel)]
        alone_only: list[Load] = []
        if device is None and torch.cuda.is_available():
            device = CudaDevice(TorchCuda(torch.device("cuda")))
            stack.callback(device.close)
        if device is not None:
            found = device_loads(stack, device, *_device_sizes(device, bounded_numel, op_bytes))
            loads += [load for load in found if load.lane != NORM]
            alone_only = [load for load in found if load.lane == NORM]
        store = TierStore(settings)
        stack.callback(store.close)
        for path in store.paths.values():
            if device is not None:
                _check_space(path, 4 * op_bytes + bounded_numel * STATE_BYTES * 5 // 4)
            loads += path_loads(stack, path, op_bytes)
        measured: list[MeasurementRound] = []
        steps: list[MeasuredStep] = []
        for _ in range(rounds):
            measured.append(measure(loads, alone_only, seconds, progress))
            if device is not None:
                progress("steps of an engine, on each path too" if settings else "steps of an engine")
                d2h = measured[-1].alone[D2H].rate
                steps += engine_steps(device, _step_numel(device, numel), threads, d2h, {})
                steps += engine_steps(device, bounded_numel, threads, d2h, settings) if settings else []
            after_round()
        progress("ops that do nothing")
        overhead = op_overhead_seconds(list(settings))
        card = replace(_card(*medians(measured), list(settings)), overhead_seconds=overhead)
        if steps:
            alone, card = card, fitted_card(card, steps)
            in_steps = (card.cpu_params_per_second or 1.0) / (alone.cpu_params_per_second or 1.0)
            by_threads = {count: found * in_steps for count, found in by_threads.items()}
        else:
            progress("a step of one subgroup")
            card = replace(card, step_seconds=step_seconds(overhead))
    return Calibration(
        card=card,
        hardware=hardware(paths),
        cpu_threads=by_threads | {threads: card.cpu_params_per_second or 0.0},
        card_threads=threads,
        measured_at=time.time(),
    )


def _numel_beyond_caches() -> int:
    """Number of parameters whose update on the CPU needs CACHE_MULTIPLE times the memory of the last-level cache: at
    least NUMEL, and no more than half of the available memory allows."""
    bytes_per_param = sum(BYTES_PER_PARAM)
    room = host_available_bytes() // (2 * 5 * bytes_per_param)
    return max(NUMEL, min(CACHE_MULTIPLE * last_level_cache_bytes() // bytes_per_param, room))


def _device_sizes(device: Device, numel: int, op_bytes: int) -> tuple[int, int]:
    """The number of parameters of the update, and the bytes of each copy, with which `device` is measured: those given,
    or more for a GPU, as far as its free memory and host memory allow."""
    if device.kind != "cuda":
        return numel, op_bytes
    free = device.capacity_bytes - device.in_use_bytes
    return (
        max(numel, min(GPU_NUMEL, free // (GPU_SHARE * sum(BYTES_PER_PARAM)))),
        max(op_bytes, min(GPU_OP_BYTES, free // GPU_SHARE, host_available_bytes() // GPU_SHARE)),
    )


def _step_numel(device: Device, numel: int) -> int:
    """The number of parameters of the steps of an engine without a storage path: `numel`, or more for a GPU, as far as
    its free memory and host memory allow."""
    if device.kind != "cuda":
        return numel
    free = min(device.capacity_bytes - device.in_use_bytes, host_available_bytes())
    return max(numel, min(GPU_STEP_NUMEL, free // (GPU_SHARE * sum(BYTES_PER_PARAM))))


def _check_space(path: StoragePath | ObjectPath, needed_bytes: int) -> None:
    """Raises PathFull if the path lacks the space for all measurements. Called at the start, so that calibration does
    not fail after a minute."""
    free = path.free_bytes
    if free is not None and needed_bytes > free:
        raise PathFull(
            f"Calibration stores up to {needed_bytes:,} bytes on path {path.name}, {free:,} are free: free some, or "
            "raise its capacity_bytes.",
            needed_bytes, free,
        )  # fmt: skip


def _card(
    alone: Mapping[str, LaneThroughput], keeps: Mapping[str, Mapping[str, float]], paths: Sequence[str]
) -> RateCard:
    """Makes a rate card from the rates of lanes alone and from `keeps`: the share of its rate that a lane keeps while
    another lane works."""
    rates = {lane: found.rate for lane, found in alone.items()}
    lanes = {name: path_lanes(name) for name in paths}
    return RateCard(
        cpu_params_per_second=rates[CPU],
        h2d_bytes_per_second=rates.get(H2D),
        d2h_bytes_per_second=rates.get(D2H),
        device_params_per_second=rates.get(DEVICE),
        norm_params_per_second=rates.get(NORM),
        paths={
            name: PathRates(read_bytes_per_second=rates[read], write_bytes_per_second=rates[write])
            for name, (read, write) in lanes.items()
        },
        op_seconds={lane: found.op_seconds for lane, found in alone.items() if found.op_seconds},
        keeps=keeps,
    )


def _cpu_rates_by_threads(numel: int, seconds: float, excluded: int, progress: Progress) -> dict[int, float]:
    """Measures the update on the CPU with 1, 2, 4, … threads and with one thread per CPU; the number `excluded` is left
    out. Returns parameters per second by number of threads."""
    cpus = usable_cpus()
    counts = {cpus, *(2**power for power in range(cpus.bit_length()) if 2**power <= cpus)} - {excluded}
    found: dict[int, float] = {}
    for threads in sorted(counts):
        progress(f"update on the CPU, {threads} thread{'s' * (threads > 1)}")
        with ThreadPool(threads) as pool:
            found[threads] = rate(cpu_load(pool, numel).once, seconds)
    return found
