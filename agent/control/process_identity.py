"""Identity of a process across hosts, and whether another process has ended."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from tidegate.wire.agent import Holder, ProcessId

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = "/proc/self/ns/pid"
_ENDED: Final = -1
"""Marker instead of a start time: the process does not exist."""


def this_process() -> ProcessId | None:
    """Identity of this process; None where the system does not provide it (no /proc, or the /proc of another PID
    namespace)."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        boot, namespace = _BOOT.read_text().strip(), os.readlink(_NAMESPACE)
    except OSError:
        return None
    started = _started(os.getpid())
    if started is None or started == _ENDED:
        return None
    return ProcessId(boot=boot, namespace=namespace, pid=os.getpid(), started=started)


def this_host() -> str:
    """Name of this host, as reported to the daemon: at most 64 characters."""
    return socket.gethostname()[:64]


def is_observable(holder: Holder | None) -> bool:
    """Whether this process can observe if `holder` is alive: same machine, same boot, same PID namespace. Machines that
    were cloned while running have the same boot id, so the host's name is compared, too."""
    here = this_process()
    if holder is None or holder.process is None or here is None or holder.host != this_host():
        return False
    return (holder.process.boot, holder.process.namespace) == (here.boot, here.namespace)


def has_ended(holder: Holder | None) -> bool:
    """Whether it is certain that the process of `holder` has ended. False for a process in another container or on
    another host, which cannot be observed.

    The number of a PID namespace may be reused: then all processes of the old namespace have ended, and a process with
    the same pid has another start time.
    """
    if holder is None or holder.process is None or not is_observable(holder):
        return False
    return _started(holder.process.pid) not in (holder.process.started, None)


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; `_ENDED` when it does not exist, None when it is hidden."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The program's name, in parentheses, may contain any character. State is field 3, the start time field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _ENDED if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _ENDED
    except (OSError, OverflowError):
        return None
    return None
