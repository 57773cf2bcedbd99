"""Device memory of released gradients, until the device has read them.

The host enqueues a backward far ahead of the device. A gradient whose copy was issued has let go of its memory, but
nobody gets this memory before the copy is done: a backward that never waits holds all gradients at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tidegate.agent.devices.base import Event


class GradientMemory:
    """Counts the bytes of gradients that came and that are not known to be read. Lanes have threads of their own."""

    def __init__(self) -> None:
        self._room_bytes = 0
        self._largest_bytes = 0
        self._held_bytes = 0
        self._bytes: dict[int, int] = {}
        """By parameter, of those that are counted."""
        self._reads_left: list[int] = []
        """By parameter: reads that are not known to be done."""
        self._issued: deque[tuple[Event, Sequence[int]]] = deque()
        """Reads on their lanes, with the parameters that they read; the oldest first."""
        self._lock = threading.Lock()

    def expect(self, reads: Sequence[int], room_bytes: int) -> None:
        """A plan begins, and nothing of the last one is left: so often each parameter's gradient is read, and
        gradients may take so many bytes."""
        with self._lock:
            self._forget()
            self._reads_left, self._room_bytes = list(reads), room_bytes

    def came(self, param: int, nbytes: int) -> None:
        with self._lock:
            self._held_bytes += nbytes - self._bytes.get(param, 0)
            self._bytes[param] = nbytes
            self._largest_bytes = max(self._largest_bytes, nbytes)

    def read(self, params: Sequence[int], done: Event) -> None:
        """An op that reads these gradients is on its lane."""
        with self._lock:
            self._issued.append((done, params))

    @property
    def full(self) -> bool:
        """One more gradient, as large as the largest so far, would have no room. One that needs more than half of the
        room is not waited for: reads and the backward would never go on at once."""
        return (
            bool(self._bytes) and self._held_bytes + min(self._largest_bytes, self._room_bytes // 2) > self._room_bytes
        )

    def wait_for_oldest(self) -> bool:
        """Waits for the oldest read that was issued; False when there is none."""
        with self._lock:
            if not self._issued:
                return False
            done, params = self._issued.popleft()
        done.wait()
        with self._lock:
            for param in params:
                self._reads_left[param] -= 1
                if self._reads_left[param] == 0:
                    self._held_bytes -= self._bytes.pop(param, 0)
        return True

    def forget(self) -> None:
        """All gradients were used or dropped."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._held_bytes = 0
        self._bytes.clear()
        self._issued.clear()
