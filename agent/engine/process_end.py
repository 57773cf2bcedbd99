"""Lanes come to rest before the interpreter ends.

Lane threads are daemon threads. One that is inside torch or a native call when the interpreter ends is unwound where it
asks for the interpreter's lock (before Python 3.14): std::terminate, and a training that was done ends with SIGABRT.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from typing import Protocol

from tidegate.agent.engine.last_reference import LONGEST_WAIT_SECONDS

log = logging.getLogger("tidegate")


class Ends(Protocol):
    def end_with_process(self, deadline: float) -> None:
        """Finishes the update that was begun, begins nothing else, and ends its threads; not long after `deadline`."""


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
