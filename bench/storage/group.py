"""Control groups of the kernel: for processes that are throttled together, or share a memory limit."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

MEMORY_V1 = Path("/sys/fs/cgroup/memory")
UNIFIED = Path("/sys/fs/cgroup")


class Group:
    """A control group of the kernel, as a folder below `root`. A context manager: the group is made at the beginning
    and removed at the end. Its processes must have ended before that."""

    def __init__(self, root: Path, name: str = "group") -> None:
        self.folder = root / f"tidegate-bench-{name}-{os.getpid()}"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(50):
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)

    @property
    def members(self) -> str:
        """The file to which a process writes its id to join the group."""
        return str(self.folder / "cgroup.procs")


class MemoryGroup(Group):
    """A control group that measures and limits the memory of its processes, including the page cache. The kernel kills
    processes if the limit cannot be kept.

    OSError in the cases for which `memory_unavailable` gives a reason.
    """

    def __init__(self, name: str) -> None:
        self._first = MEMORY_V1.is_dir()
        super().__init__(MEMORY_V1 if self._first else UNIFIED, name)

    @property
    def version(self) -> str:
        return "cgroup v1" if self._first else "cgroup v2"

    @property
    def peak_bytes(self) -> int:
        """The group's highest memory use, in bytes."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self._first else "memory.peak")).read_text())

    def limit(self, nbytes: int) -> None:
        """Limits the group's memory to `nbytes` from now on, without use of swap where the kernel can limit it."""
        first, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self._first else (
            "memory.max", "memory.swap.max",
        )  # fmt: skip
        (self.folder / first).write_text(str(nbytes))
        with suppress(OSError):  # kernels without accounting of swap
            (self.folder / swap).write_text(str(nbytes) if self._first else "0")


def memory_unavailable() -> str | None:
    """The reason why memory cannot be limited on this machine; None if it can."""
    if os.geteuid() != 0:
        return "a control group for memory needs root"
    controllers = UNIFIED / "cgroup.subtree_control"
    if not MEMORY_V1.is_dir() and not (controllers.exists() and "memory" in controllers.read_text().split()):
        return f"there is no memory controller in {MEMORY_V1} or {UNIFIED}"
    try:
        with MemoryGroup("probe") as group:
            _ = group.peak_bytes
    except OSError as error:
        return f"a control group for memory cannot be made: {error}"
    return None
