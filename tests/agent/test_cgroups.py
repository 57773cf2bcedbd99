"""Limits of control groups, as files of both versions of the kernel's interface say them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tidegate.agent.cgroups import host_available_bytes, usable_cpus

STAT = "anon 500\ninactive_file 40\n"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10_000}))


def mounted(folder: Path, files: Mapping[str, str]) -> Path:
    """A mounted interface with these files, by their path."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "cgroup").mkdir(exist_ok=True)
    return folder / "cgroup"


def own(folder: Path, text: str) -> Path:
    file = folder / "own"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("files", "groups", "cpus"),
    [
        ({}, "0::/\n", 16),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 16),
        ({"cpu.max": "400000 100000\n"}, "0::/\n", 4),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "9900000 100000\n"}, "0::/\n", 16),
        ({"job.slice/step/cpu.max": "max 100000\n", "job.slice/cpu.max": "300000 100000\n"}, "0::/job.slice/step\n", 3),
        ({"cpu.max": "200000 100000\n"}, "0::/docker/of the host, not visible here\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/\n", 16),
        ({"cpu/job/cpu.cfs_quota_us": "600000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/job\n", 6),
        ({"cpu.max": "what is this?\n"}, "0::/\n", 16),
    ],
)  # fmt: skip
def test_a_quota_of_cpu_time_counts_as_so_many_cpus(
    files: dict[str, str], groups: str, cpus: int, tmp_path: Path
) -> None:
    assert usable_cpus(mounted(tmp_path, files), own(tmp_path, groups)) == cpus


@pytest.mark.parametrize(
    ("files", "groups", "free"),
    [
        ({}, "0::/\n", 10_000),
        ({"memory.max": "max\n", "memory.current": "600\n", "memory.stat": STAT}, "0::/\n", 10_000),
        ({"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": STAT}, "0::/\n", 440),
        ({"memory.max": "500\n", "memory.current": "600\n", "memory.stat": STAT}, "0::/\n", 0),
        ({f"job/{name}": text for name, text in
          {"memory.max": "2000\n", "memory.current": "600\n", "memory.stat": STAT}.items()}, "0::/job/step\n", 1440),
        ({"memory/memory.limit_in_bytes": "3000\n", "memory/memory.usage_in_bytes": "1000\n",
          "memory/memory.stat": "total_inactive_file 5\n"}, "5:memory:/\n0::/\n", 2005),
    ],
)  # fmt: skip
def test_memory_of_a_control_group_counts(files: dict[str, str], groups: str, free: int, tmp_path: Path) -> None:
    assert host_available_bytes(mounted(tmp_path, files), own(tmp_path, groups)) == free


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert usable_cpus(nowhere, nowhere) == 16
    assert host_available_bytes(nowhere, nowhere) == 10_000
