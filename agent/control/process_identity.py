"""Identity of a process that is valid across hosts, and a test whether another process has ended."""

from __future__ import annotations

import os
import socket

from tidegate.agent.procfs import ENDED, boot_id, observed_start, pid_namespace
from tidegate.wire.agent import Holder, ProcessId


def this_process() -> ProcessId | None:
    """Identity of this process; None where the system does not provide it (no /proc, or the /proc of another PID
    namespace)."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        boot, namespace = boot_id(), pid_namespace()
    except OSError:
        return None
    started = observed_start(os.getpid())
    if started is None or started == ENDED:
        return None
    return ProcessId(boot=boot, namespace=namespace, pid=os.getpid(), started=started)


def this_host() -> str:
    """Name of this host, as reported to the daemon: at most 64 characters."""
    return socket.gethostname()[:64]


def is_observable(holder: Holder | None) -> bool:
    """Whether this process can find out if the process of `holder` (the agent that holds a rank) is alive. This needs
    the same machine, boot and PID namespace. The host's name is compared, too, because machines that were cloned while
    running have the same boot id."""
    here = this_process()
    if holder is None or holder.process is None or here is None or holder.host != this_host():
        return False
    return (holder.process.boot, holder.process.namespace) == (here.boot, here.namespace)


def has_ended(holder: Holder | None) -> bool:
    """Whether it is certain that the process of `holder` (the agent that holds a rank) has ended. False for a process
    in another container or on another host, which cannot be observed.

    The start time of the process is compared as well, because the kernel may give its pid, and the number of its PID
    namespace, to a later process or namespace.
    """
    if holder is None or holder.process is None or not is_observable(holder):
        return False
    return observed_start(holder.process.pid) not in (holder.process.started, None)
