"""What a calibration is of: when one of these things changes, another is needed."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from tidegate.agent.tiers.file_path import PathSettings
from tidegate.kernels import instruction_set

PathLike = str | os.PathLike[str] | PathSettings


def available_cpus() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))


def settings_of(path: PathLike) -> PathSettings:
    """Those of a directory are the ones that `Offload` takes when it is given nothing else."""
    return path if isinstance(path, PathSettings) else PathSettings(directory=path)


def hardware(paths: Mapping[str, PathLike] | None = None) -> dict[str, str]:
    """What a calibration is of. When one of these changes, another is needed. A path that is not there is `missing`."""
    found = {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cpus": str(available_cpus()),
        "memory_gib": str(round(psutil.virtual_memory().total / 2**30)),
        "instruction_set": instruction_set(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for name, path in (paths or {}).items():
        found[f"path {name}"] = _place(settings_of(path))
    return found


def _place(path: PathSettings) -> str:
    directory = Path(path.directory)
    try:
        device = directory.stat().st_dev
    except OSError:
        return "missing"
    how = f"{path.threads} threads, blocks of {path.block_bytes >> 10} KiB, {path.lock_slots} at once"
    return f"{directory.resolve()} on device {device}, {how}"


def _cpu_model() -> str:
    """As the kernel calls it; the architecture where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
