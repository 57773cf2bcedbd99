"""Ctrl-C while the engine must not be cut short: noted, and raised when it has come to rest."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Uninterrupted:
    """Inside this block the first SIGINT waits for the block's end; a second one is let through at once.

    Half an update is worth nothing, and a plan that is half dropped cannot be dropped again. Only the main thread gets
    signals; elsewhere, and inside another such block, the block does nothing.
    """

    def __enter__(self) -> Self:
        self._noted: tuple[int, FrameType | None] | None = None
        before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        nested = isinstance(getattr(before, "__self__", None), Uninterrupted)
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
