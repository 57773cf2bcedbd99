"""Delays Ctrl-C (SIGINT), and what signal handlers raise, while the engine does work that must not be interrupted."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

log = logging.getLogger("tidegate")


def wait_for_end(wait: Callable[[], bool]) -> None:
    """Calls `wait`, which waits for a short time, until it returns True. Exceptions that signal handlers raise in it,
    such as KeyboardInterrupt, do not end the wait; the first of them is raised afterwards.

    For waits on other threads, whose memory the caller frees afterwards.
    """
    first: BaseException | None = None
    while True:
        try:
            if wait():
                break
        except BaseException as error:
            if first is None:
                first = error
                log.warning("Interrupted. Reads and writes that have begun are waited for, because they use memory.")
    if first is not None:
        raise first


class DelayInterrupt:
    """Context manager that delays the first SIGINT to the end of its block; a second SIGINT takes effect at once.

    An interrupted update would leave weights and state useless. A plan (the ops of one update) whose cancellation was
    interrupted could not be cancelled later. Only the main thread gets signals: in other threads, and inside another
    such block, the block does nothing.
    """

    def __enter__(self) -> Self:
        self._noted: tuple[int, FrameType | None] | None = None
        before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        nested = isinstance(getattr(before, "__self__", None), DelayInterrupt)
        self._before = before if callable(before) and not nested else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._noted is not None and error is None:
                self._before(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None and self._before is not None:
            self._before(number, frame)
        self._noted = (number, frame)
