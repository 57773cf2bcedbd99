"""What a disk gives to fio, in memory like ours: huge pages wherever the system has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes malloc ask for huge pages, as our buffers do. With ordinary ones disks of VMs can be half as fast."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Reads and writes in equal parts. `depth`: blocks in flight of both together."""

    block_bytes: int
    depth: int
    file_bytes: int = 1 << 30
    seconds: float = 1.0


def available() -> str | None:
    """Why fio cannot be used, if it cannot."""
    return None if shutil.which("fio") else "fio is not installed: shares of its rate are null"


def rate(file: Path, mix: Mix, join: str | None = None) -> float:
    """Bytes a second, read and written together. Makes the file if it is missing; fio's own start is not counted.

    join: a file of a control group to which fio writes its process id.
    """
    if not file.exists():
        _fill(file, mix)
    job = _run(file, mix, join, rw="rw", time_based=1, runtime=f"{mix.seconds * 1000:.0f}ms")
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def _fill(file: Path, mix: Mix) -> None:
    """Written, not only reserved: reads of what was never written do not reach the disk."""
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
