"""What the control groups of this process allow: CPU time and memory. Containers, systemd units and batch jobs are
control groups. Both versions of the kernel's interface are read; without either there is no limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

MOUNTED: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def usable_cpus(mounted: Path = MOUNTED, own: Path = OWN_GROUPS) -> int:
    """Number of CPUs that this process can keep busy, at least 1: those on which it may run, or as many as its quota of
    CPU time is worth, if that is less."""
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in _cpu_quotas(mounted, own))]))


def host_available_bytes(mounted: Path = MOUNTED, own: Path = OWN_GROUPS) -> int:
    """Memory in bytes that this process can still use: free memory of the machine, or of its control groups if that is
    less."""
    return max(0, min([psutil.virtual_memory().available, *_free_memory(mounted, own)]))


def _cpu_quotas(mounted: Path, own: Path) -> Iterator[float]:
    """The quota of CPU time of each control group that has one, as a number of CPUs."""
    for group in _groups("cpu", mounted, own):
        with suppress(OSError, ValueError):
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if float(quota) > 0:  # ValueError for "max": no quota
                yield float(quota) / float(period)


def _free_memory(mounted: Path, own: Path) -> Iterator[int]:
    """Bytes that each control group with a limit may still use. Pages of files that were not used for a while count as
    free."""
    for group in _groups("memory", mounted, own):
        with suppress(OSError, ValueError):
            limit, used, cached = ("memory.max", "memory.current", "inactive_file")
            if not (group / limit).exists():
                limit, used, cached = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            most = int((group / limit).read_text())  # ValueError for "max": no limit
            rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield most - int((group / used).read_text()) + int(rows.get(cached, 0))


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all groups around it. In a container these may not be visible;
    the folder where the interface is mounted is then the container's own."""
    base, path = mounted, ""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, where = line.split(":", 2)
            if not names and not (mounted / controller).is_dir():
                path = where
            elif controller in names.split(","):
                base, path = mounted / controller, where
    parts = [part for part in path.split("/") if part]
    for length in range(len(parts), 0, -1):
        folder = base.joinpath(*parts[:length])
        if folder.is_dir():
            yield folder
    yield base
