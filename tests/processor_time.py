"""Processor time of a call, measured so that other load on the machine changes it little."""

from __future__ import annotations

import time
from collections.abc import Callable


def processor_seconds(call: Callable[[], object]) -> float:
    """Calls `call` three times. Returns the least processor time of a call, in seconds."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)
