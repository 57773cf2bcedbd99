"""Measures what this machine can do: each lane alone, then lanes together, on real hardware and nothing else."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import psutil
import torch

from tidegate.agent.devices.base import Copy, Device, GradRef, UpdateRun
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.devices.pinned import host_available_bytes
from tidegate.agent.tiers.path import PathSettings
from tidegate.agent.tiers.store import TierStore
from tidegate.errors import ConfigError
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, instruction_set, scalars
from tidegate.model.calibration import Calibration
from tidegate.model.rates import RateCard
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, path_lanes
from tidegate.plan.split import PathSpeeds

NUMEL: Final = 16_000_000
"""Parameters of the update that is measured: with its state far more than any cache holds."""
BYTES_PER_PARAM: Final = (2, 2, 4, 4, 2)
"""Weight, remainder, two moments, gradient."""
SECONDS: Final = 0.3
"""Of each measurement. With one GPU and two paths there are about forty."""
PATH_ROUNDS: Final = 3
"""The speed of a path alone is the median of so many rounds: one may meet what others do on a disk."""
SHARE_DIGITS: Final = 3
Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """Work of one lane. `once` does a piece of it and says how much that was, in parameters or bytes."""

    lane: str
    once: Callable[[], float]


def calibrate(
    paths: Mapping[str, str | os.PathLike[str]] | None = None,
    *,
    seconds: float = SECONDS,
    numel: int = NUMEL,
    path_bytes: int = 64 << 20,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measures CPU and paths, and the GPU where there is one. What is not there has no rate: nothing is emulated.

    paths: directories by name. seconds: of each measurement. path_bytes: moved each way on a path at a time; what a
    disk serves in a burst is measured if it is less than the burst. progress: told what is measured next.

    ConfigError when memory does not suffice, PathUnusable for a directory that cannot hold state.
    """
    needed = 3 * sum(BYTES_PER_PARAM) * numel
    if needed > host_available_bytes():
        raise ConfigError(f"Calibration needs {needed:,} bytes of host memory: free some, or lower numel={numel:,}.")
    settings = {name: PathSettings(directory=directory) for name, directory in (paths or {}).items()}
    with ExitStack() as stack:
        pools = _by_threads(numel, seconds, progress)
        best = max(pools, key=lambda threads: pools[threads])
        pool = stack.enter_context(ThreadPool(best))
        loads = [Load(CPU, _cpu_update(pool, numel))]
        card = RateCard(cpu_params_per_second=pools[best], overhead_seconds=0.0)
        if torch.cuda.is_available():
            device = CudaDevice(TorchCuda(torch.device("cuda")))
            stack.callback(device.close)
            loads += _device_loads(stack, device, numel)
            card = _with_device(card, loads, device, numel, seconds, progress)
        keeps = dict(_contention(loads, seconds, progress))
        store = TierStore(settings)
        stack.callback(store.close)
        speeds: dict[str, PathSpeeds] = {}
        for name, path in store.paths.items():
            progress(f"path {name} alone")
            speeds[name] = _typical([path.calibrate(path_bytes) for _ in range(PATH_ROUNDS)])
        card = replace(card, keeps=keeps).with_paths(speeds)
        for name, path in store.paths.items():
            card = _beside(card, name, loads, partial(path.calibrate, path_bytes), seconds, progress)
    return Calibration(card=card, hardware=hardware(paths), cpu_threads=pools, measured_at=time.time())


def hardware(paths: Mapping[str, str | os.PathLike[str]] | None = None) -> dict[str, str]:
    """What a calibration is of. When one of these changes, another is needed. PathUnusable paths are as `missing`."""
    found = {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "memory_gib": str(round(psutil.virtual_memory().total / 2**30)),
        "instruction_set": instruction_set(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for name, directory in (paths or {}).items():
        try:
            found[f"path {name}"] = f"{Path(directory).resolve()} on device {os.stat(directory).st_dev}"
        except OSError:
            found[f"path {name}"] = "missing"
    return found


def _cpu_model() -> str:
    """As the kernel calls it; the architecture where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


# ---- measuring


def rate(once: Callable[[], float], seconds: float) -> float:
    """What is done in a second, over at least `seconds`. The first piece, which finds everything cold, is left out."""
    once()
    amount, began = 0.0, time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds or not amount:
        amount += once()
    return amount / elapsed


def rate_beside(once: Callable[[], float], other: Callable[[], float], seconds: float) -> float:
    """`rate` of `once` while `other` is done again and again by another thread. An error of `other` is raised."""
    return beside(lambda: rate(once, seconds), other)[0]


def beside(measured: Callable[[], T], other: Callable[[], float]) -> tuple[T, float]:
    """What `measured` gives while `other` is done again and again by another thread, from before until after; and how
    much `other` did in a second. An error of `other` is raised."""
    begun, stop, failed = threading.Event(), threading.Event(), list[BaseException]()
    amount, busy = 0.0, 0.0

    def work() -> None:
        nonlocal amount, busy
        began = time.monotonic()
        begun.set()
        try:
            amount = other()
            while not stop.is_set():
                amount += other()
        except BaseException as error:
            failed.append(error)
        busy = time.monotonic() - began

    thread = threading.Thread(target=work, name="tidegate-calibrate")
    thread.start()
    try:
        begun.wait()
        found = measured()
    finally:
        stop.set()
        thread.join()
        if failed:
            raise failed[0]
    return found, amount / busy


def _typical(rounds: Sequence[PathSpeeds]) -> PathSpeeds:
    return PathSpeeds(
        read_bytes_per_second=median(one.read_bytes_per_second for one in rounds),
        write_bytes_per_second=median(one.write_bytes_per_second for one in rounds),
        duplex=sum(one.duplex for one in rounds) > len(rounds) // 2,
    )


def _share(together: float, alone: float) -> float:
    """What is kept of a speed: noise never makes it more than all."""
    return min(1.0, max(10.0**-SHARE_DIGITS, round(together / alone, SHARE_DIGITS)))


def _contention(loads: Sequence[Load], seconds: float, progress: Progress) -> Iterator[tuple[str, dict[str, float]]]:
    alone = {load.lane: rate(load.once, seconds) for load in loads}
    for load in loads:
        shares: dict[str, float] = {}
        for other in loads:
            if other is not load:
                progress(f"{load.lane} beside {other.lane}")
                shares[other.lane] = _share(rate_beside(load.once, other.once, seconds), alone[load.lane])
        if shares:
            yield load.lane, shares


def _beside(
    card: RateCard,
    name: str,
    loads: Sequence[Load],
    path: Callable[[], PathSpeeds],
    seconds: float,
    progress: Progress,
) -> RateCard:
    """The card with what this path and each load take from each other."""
    keeps = {lane: dict(others) for lane, others in card.keeps.items()}
    for load in loads:
        progress(f"path {name} and {load.lane}")
        alone = rate(load.once, seconds)
        # Whole calibrations of the path within the load: it must not outlast what it is measured beside.
        rounds, with_path = beside(lambda: [path() for _ in range(PATH_ROUNDS)], load.once)
        speeds = _typical(rounds)
        reads, writes = path_lanes(name)
        before = card.paths[name]
        assert before.read_bytes_per_second is not None
        assert before.write_bytes_per_second is not None
        for lane, now, then in (
            (reads, speeds.read_bytes_per_second, before.read_bytes_per_second),
            (writes, speeds.write_bytes_per_second, before.write_bytes_per_second),
        ):
            keeps.setdefault(load.lane, {})[lane] = _share(with_path, alone)
            keeps.setdefault(lane, {})[load.lane] = _share(now, then)
    return replace(card, keeps=keeps)


# ---- loads


def _by_threads(numel: int, seconds: float, progress: Progress) -> dict[int, float]:
    """Parameters per second of the update on the CPU: 1, 2, 4… threads, and all of them."""
    cpus = len(os.sched_getaffinity(0))
    counts = sorted({cpus, *(2**power for power in range(cpus.bit_length()) if 2**power <= cpus)})
    found: dict[int, float] = {}
    for threads in counts:
        progress(f"update on the CPU, {threads} thread{'s' * (threads > 1)}")
        with ThreadPool(threads) as pool:
            found[threads] = rate(_cpu_update(pool, numel), seconds)
    return found


def _cpu_update(pool: ThreadPool, numel: int) -> Callable[[], float]:
    arrays = [torch.zeros(nbytes * numel, dtype=torch.uint8) for nbytes in BYTES_PER_PARAM]

    def once() -> float:
        _run(numel, *(array.data_ptr() for array in arrays)).apply(pool)
        return float(numel)

    return once


def _run(numel: int, weight: int, aux: int, exp_avg: int, exp_avg_sq: int, grad: int) -> UpdateRun:
    values = scalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3)
    return UpdateRun(numel, weight, WeightFormat.BF16_REMAINDER, aux, exp_avg, exp_avg_sq, grad, GradDtype.BF16, values)


def _device_loads(stack: ExitStack, device: Device, numel: int) -> list[Load]:
    nbytes = 8 * numel
    places = [device.alloc(nbytes * numel) for nbytes in BYTES_PER_PARAM]
    for place in places:
        stack.callback(device.free, place)

    def copies(lane: str) -> Load:
        host, there = device.host_buffer(nbytes), device.alloc(nbytes)
        stack.callback(device.free, there)

        def once() -> float:
            near = host.data_ptr()
            device.copy(lane, [Copy(there, near, nbytes) if lane == H2D else Copy(near, there, nbytes)]).wait()
            return float(nbytes)

        return Load(lane, once)

    def update() -> float:
        device.update([_run(numel, *places)]).wait()
        return float(numel)

    return [copies(H2D), copies(D2H), Load(DEVICE, update)]


def _with_device(
    card: RateCard, loads: Sequence[Load], device: Device, numel: int, seconds: float, progress: Progress
) -> RateCard:
    alone: dict[str, float] = {}
    for load in loads[1:]:
        progress(f"{load.lane} alone")
        alone[load.lane] = rate(load.once, seconds)
    gradient = device.alloc(2 * numel)

    def norm() -> float:
        device.norms([GradRef(gradient, numel, GradDtype.BF16)])[0].wait()
        return float(numel)

    try:
        progress("norm alone")
        norms = rate(norm, seconds)
    finally:
        device.free(gradient)
    return replace(
        card,
        h2d_bytes_per_second=alone[H2D],
        d2h_bytes_per_second=alone[D2H],
        device_params_per_second=alone[DEVICE],
        norm_params_per_second=norms,
    )
