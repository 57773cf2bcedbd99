"""Keeps daemon threads from freeing tensors while the interpreter exits, which would crash the process.

torch frees a tensor without the interpreter lock (GIL) and then takes the lock again. Before Python 3.14, a daemon
thread that takes the lock after the interpreter has begun to exit is unwound instead, through frames of torch that must
not be unwound. This calls std::terminate, and a process whose training was complete ends with SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final

LONGEST_WAIT_SECONDS: Final = 5.0
"""Longest time that the exit of the process waits for a thread that is freeing objects."""

_freeing = threading.Lock()
_exiting = False
_leaked_at_exit: list[object] = []


def release_unless_exiting(held: list[Any]) -> None:
    """Empties the list `held`, which frees the objects that have no other reference. If the process has begun to exit,
    the objects are kept until its end instead."""
    with _freeing:
        if _exiting:
            _leaked_at_exit.extend(held)
        held.clear()


def _replace_lock_after_fork() -> None:
    """Replaces the lock in a forked child: a thread that the child does not have may have held the old one."""
    global _freeing
    _freeing = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock_after_fork)


@atexit.register
def _mark_exit() -> None:
    """Records that the process exits, after waiting for a thread that is freeing objects. `atexit` calls this before
    the interpreter begins to unwind other threads."""
    global _exiting
    acquired = _freeing.acquire(timeout=LONGEST_WAIT_SECONDS)
    _exiting = True
    if acquired:
        _freeing.release()
