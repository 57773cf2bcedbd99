"""Which process this is, and whether one that said so elsewhere has ended."""

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
"""Stands for the start time of a process that there is not."""


def this_process() -> ProcessId | None:
    """This one; None where the system does not say (it has no /proc, or one of another PID namespace)."""
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
    """Its name, as agents tell it."""
    return socket.gethostname()[:64]


def is_seen(holder: Holder | None) -> bool:
    """Whether this process can tell if that one lives: it is on the same machine, started once, and in the same PID
    namespace. Machines that were cloned while they ran have the same boot id: the host's name is compared, too."""
    here = this_process()
    if holder is None or holder.process is None or here is None or holder.host != this_host():
        return False
    return (holder.process.boot, holder.process.namespace) == (here.boot, here.namespace)


def has_ended(holder: Holder | None) -> bool:
    """Whether it is certain that this process is no more. One in another container, or on another host, is not seen.

    The number of a PID namespace may be given to a new one: then all processes of the old one have ended, and what is
    found under the same pid began at another time.
    """
    if holder is None or holder.process is None or not is_seen(holder):
        return False
    return _started(holder.process.pid) not in (holder.process.started, None)


def _started(pid: int) -> int | None:
    """When the process began, in clock ticks after the machine's; `_ENDED` for none; None where it is hidden."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may have any characters. State is field 3, the start time field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _ENDED if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _ENDED
    except (OSError, OverflowError):
        return None
    return None
