"""Identity of the hardware of a calibration: if one of its values changes, the machine must be calibrated again."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tidegate.agent.cgroups import usable_cpus
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.kernels import instruction_set
from tidegate.knobs.setting_checks import check_directory

PathLike = str | os.PathLike[str] | PathSettings


def last_level_cache_bytes(sys: Path = Path("/sys")) -> int:
    """Size in bytes of the last-level caches of the CPUs that this process may run on, all together; 0 if the kernel
    does not report them."""
    sizes: dict[str, int] = {}
    """Size of each cache, by the CPUs that share it."""
    for cpu in os.sched_getaffinity(0):
        caches = (sys / f"devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")
        last = max(caches, key=lambda cache: int(cache.name.removeprefix("index")), default=None)
        if last is not None:
            with suppress(OSError, ValueError):
                kib = int((last / "size").read_text().strip().removesuffix("K"))
                sizes[(last / "shared_cpu_list").read_text()] = kib << 10
    return sum(sizes.values())


def settings_of(path: PathLike) -> PathSettings:
    """The settings of a path. If `path` is only a directory, all other settings have their defaults. ConfigError for
    the address of an object store, because calibration measures directories only."""
    if isinstance(path, PathSettings):
        return path
    check_directory("path", path, "leave it out; a run measures its paths in object stores when it begins")
    return PathSettings(directory=path)


def hardware(paths: Mapping[str, PathLike] | None = None) -> dict[str, str]:
    """Returns the properties of the hardware that a calibration belongs to: name and value of each. A path whose
    directory is missing has the value `missing`."""
    properties = {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cpus": str(usable_cpus()),
        "memory_gib": str(round(psutil.virtual_memory().total / 2**30)),
        "instruction_set": instruction_set(),
    }
    if torch.cuda.is_available():
        try:
            properties["gpu"] = torch.cuda.get_device_name()
        except RuntimeError:  # a process that was forked after CUDA began cannot ask CUDA
            properties["gpu"] = "not known in a forked process"
    for name, path in (paths or {}).items():
        properties[f"path {name}"] = _path_identity(settings_of(path))
    return properties


def _path_identity(path: PathSettings) -> str:
    """Directory, device and settings of a path as text."""
    directory = Path(path.directory)
    try:
        device = directory.stat().st_dev
    except OSError:
        return "missing"
    how = f"{path.threads} threads, blocks of {path.block_bytes >> 10} KiB, {path.lock_slots} at once"
    return f"{directory.resolve()} on device {device}, {how}"


def _cpu_model() -> str:
    """The CPU model that the kernel reports, or the architecture if the kernel reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
