"""Throughput of a disk by fio. Its memory has huge pages where the system has them, like Tidegate's buffers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variables that make malloc use huge pages, as Tidegate's buffers do. With ordinary pages, disks of
virtual machines can be half as fast."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """An I/O load of reads and writes. depth: blocks in flight, reads and writes together. read_share: bytes that are
    read, as a share of all."""

    block_bytes: int
    depth: int
    read_share: float = 0.5
    file_bytes: int = 1 << 30
    seconds: float = 1.0


def available() -> str | None:
    """The reason why fio cannot be used on this machine; None if it can."""
    return None if shutil.which("fio") else "fio is not installed: shares of its rate are null"


def rate(file: Path, mix: Mix, join: str | None = None) -> float:
    """Bytes per second of reads and writes together. Creates the file if it is missing; fio's start time is not
    counted.

    join: file of a control group, to which fio's process adds its id.
    """
    if not file.exists():
        _fill(file, mix)
    reads = round(100 * mix.read_share)
    job = _run(file, mix, join, rw="rw", rwmixread=reads, time_based=1, runtime=f"{mix.seconds * 1000:.0f}ms")
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def _fill(file: Path, mix: Mix) -> None:
    """Creates the file by writing all of its blocks. Reserving them is not enough, because reads of unwritten blocks do
    not reach the disk."""
    _run(file, mix, None, rw="write", end_fsync=1)


def _run(file: Path, mix: Mix, join: str | None, **options: str | int) -> dict[str, dict[str, float]]:
    settings = {
        "name": "mix",
        "filename": file,
        "ioengine": "libaio",
        "direct": 1,
        "bs": mix.block_bytes,
        "size": mix.file_bytes,
        "iodepth": mix.depth,
        "iomem_align": "2M",
        "output-format": "json",
        **options,
    }
    command = ["fio", *(f"--{key}={value}" for key, value in settings.items())]
    if join is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', join, *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, **HUGE_PAGES})
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return dict(job)
