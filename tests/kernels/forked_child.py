"""What a forked child of a process with native threads can do."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = work()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
