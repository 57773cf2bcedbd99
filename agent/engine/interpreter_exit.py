"""Stops lane threads before the interpreter exits, so that the exit does not crash.

Lane threads are daemon threads. Before Python 3.14, a daemon thread that is inside torch or a native call when the
interpreter exits is unwound when it tries to take the interpreter lock (GIL). This calls std::terminate, and a process
whose training was complete ends with SIGABRT. A thread of torch's gloo backend does the same: it frees the tensors of a
collective a moment after the wait for this collective has returned.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from pathlib import Path
from typing import Final, Protocol

from tidegate.agent.engine.last_references import LONGEST_WAIT_SECONDS

log = logging.getLogger("tidegate")


class StopsAtExit(Protocol):
    """An object with threads that must end before the interpreter exits."""

    def stop_before_exit(self, deadline: float) -> None:
        """Finishes the update that has begun, begins nothing else and ends the threads, at the latest soon after
        `deadline` (seconds on the monotonic clock)."""


_GLOO_THREAD: Final = "pt_gloo_runloop"
"""The name that torch gives to the threads of its gloo backend."""
_POLL_SECONDS: Final = 0.002

_alive: weakref.WeakSet[StopsAtExit] = weakref.WeakSet()


def stop_at_exit(threads_owner: StopsAtExit) -> None:
    """Registers an object whose `stop_before_exit` is called when the process ends, if the object exists then."""
    _alive.add(threads_owner)


@atexit.register
def stop_all() -> None:
    """Stops all registered objects, then waits for gloo's threads. Called by `atexit`, which runs hooks in reverse
    order of registration: the hooks of attachments, which sign off from the daemon, run before this one, and the hook
    of `last_references` runs after it."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    for threads_owner in tuple(_alive):
        try:
            threads_owner.stop_before_exit(deadline)
        except Exception:
            log.exception("the lanes of an optimizer could not be stopped at the end of the process")
    _wait_for_gloo(time.monotonic() + LONGEST_WAIT_SECONDS)


def _wait_for_gloo(deadline: float) -> None:
    """Waits until all gloo threads sleep, which means that they have no work, at most until `deadline`. Sleeps between
    two checks, so that a thread that needs the interpreter lock (GIL) gets it. Takes a few milliseconds; returns at
    once if there are no gloo threads."""
    asleep = 0
    while asleep < 2 and time.monotonic() < deadline:
        states = _states_of_threads(_GLOO_THREAD)
        if not states:
            return
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_POLL_SECONDS)


def _states_of_threads(name: str) -> list[str]:
    """The states (R, S, D: see proc(5)) of this process's threads with this name; an empty list without /proc."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            head, _, rest = task.read_text().rpartition(")")
        except OSError:  # the thread has ended
            continue
        if head.partition("(")[2] == name:
            states.append(rest.split()[0])
    return states
