"""Lanes come to rest before the interpreter ends.

Lane threads are daemon threads. One that is inside torch or a native call when the interpreter ends is unwound where it
asks for the interpreter's lock (before Python 3.14): std::terminate, and a training that was done ends with SIGABRT.
The same is so of a thread of torch's gloo backend, which lets go of the tensors of a collective a moment after somebody
has waited for that collective.
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


class Ends(Protocol):
    def end_with_process(self, deadline: float) -> None:
        """Finishes the update that was begun, begins nothing else, and ends its threads; not long after `deadline`."""


_GLOO_THREAD: Final = "pt_gloo_runloop"
"""As torch names the threads of its gloo backend."""
_POLL_SECONDS: Final = 0.002

_alive: weakref.WeakSet[Ends] = weakref.WeakSet()


def ends_with_process(one: Ends) -> None:
    """It is told when the process ends, while it lives."""
    _alive.add(one)


@atexit.register
def end_all() -> None:
    """Hooks run last ones first: attachments have said goodbye when this one runs, and `last_reference` comes after."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    for one in tuple(_alive):
        try:
            one.end_with_process(deadline)
        except Exception:
            log.exception("the lanes of an optimizer did not end")
    _wait_for_gloo(time.monotonic() + LONGEST_WAIT_SECONDS)


def _wait_for_gloo(deadline: float) -> None:
    """Waits until each thread of gloo sleeps, as it does without work. This thread sleeps between two looks, so that a
    thread which wants the interpreter's lock gets it. A few milliseconds, and no time where there is no such thread."""
    asleep = 0
    while asleep < 2 and time.monotonic() < deadline:
        states = _states_of_threads(_GLOO_THREAD)
        if not states:
            return
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_POLL_SECONDS)


def _states_of_threads(name: str) -> list[str]:
    """The states (R, S, D: see proc(5)) of the threads of this process that have this name; none without /proc."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            head, _, rest = task.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        if head.partition("(")[2] == name:
            states.append(rest.split()[0])
    return states
