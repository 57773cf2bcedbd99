"""Reads the data from /proc that identify a process: the boot id, the PID namespace and the start time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, Literal

ENDED: Final = -1
"""Returned by `start_ticks` instead of a start time: the process has ended, and its parent has not reaped it yet."""


def boot_id() -> str:
    """Id of the present boot of this kernel. OSError where the system does not provide it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Id of the namespace of process ids that this process is in. OSError where the system does not provide it."""
    return os.readlink("/proc/self/ns/pid")


def start_ticks(pid: int | Literal["self"] = "self") -> int:
    """Start time of a process in clock ticks after boot; `ENDED` when it has ended. Together with the process id it
    identifies the process. OSError when there is no such process, or it is hidden."""
    # The second field, the program's name in parentheses, may contain any bytes. Behind it come the state (field 3) and
    # the start time (field 22).
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return ENDED if fields[0] in "ZX" else int(fields[19])


def observed_start(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; `ENDED` when it does not exist, None when it is hidden."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return start_ticks(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ENDED
    except (OSError, OverflowError):
        return None
    return None
