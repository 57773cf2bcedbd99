"""What daemon threads hold last: they let go of it in time, or not at all.

torch frees a tensor without the interpreter's lock and then asks for the lock again. Once the interpreter ends, a
daemon thread that asks for it is unwound instead (before Python 3.14), through frames of torch that may not be:
std::terminate, and a training that was done ends with SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final

LONGEST_WAIT_SECONDS: Final = 5.0
"""That the end of the process waits for a thread that frees something just then."""

_freeing = threading.Lock()
_ends = False
_kept: list[object] = []


def let_go(held: list[Any]) -> None:
    """Empties `held`. What it held stays until the process has ended when that has begun."""
    with _freeing:
        if _ends:
            _kept.extend(held)
        held.clear()


def _forked() -> None:
    """A thread that is not in this process may have had the lock."""
    global _freeing
    _freeing = threading.Lock()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    """Runs before the interpreter takes its lock away from other threads."""
    global _ends
    got_it = _freeing.acquire(timeout=LONGEST_WAIT_SECONDS)
    _ends = True
    if got_it:
        _freeing.release()
