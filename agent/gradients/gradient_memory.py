"""Bounds the device memory of released gradients until the device has read them.

The host enqueues a backward far ahead of the device. When the copy of a gradient is issued, the engine releases the
memory of the gradient, but this memory cannot be reused before the copy is done. Without waiting, all gradients of a
backward would be in memory at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tidegate.agent.devices.base import Event


class GradientMemory:
    """Counts the bytes of gradients in device memory: from the moment that autograd has made a gradient until all ops
    that read it (copies and updates) are done. Thread-safe."""

    def __init__(self) -> None:
        self._room_bytes = 0
        self._largest_bytes = 0
        self._held_bytes = 0
        self._bytes: dict[int, int] = {}
        """Bytes of the counted gradients, by parameter."""
        self._reads_left: list[int] = []
        """Number of reads that are not known to be done, by parameter."""
        self._issued: deque[tuple[Event, Sequence[int]]] = deque()
        """Issued reads, the oldest first: the event at the end of each read, and the parameters whose gradients it
        reads."""
        self._lock = threading.RLock()

    def expect(self, reads: Sequence[int], room_bytes: int) -> None:
        """Resets all counts for a new plan.

        reads: for each parameter, the number of ops that will read its gradient.
        room_bytes: device memory that gradients may take.
        """
        with self._lock:
            self.forget()
            self._reads_left, self._room_bytes = list(reads), room_bytes

    def add(self, param: int, nbytes: int) -> None:
        """Adds the bytes of a gradient that has arrived to the count. param: number of its parameter."""
        with self._lock:
            self._held_bytes += nbytes - self._bytes.get(param, 0)
            self._bytes[param] = nbytes
            self._largest_bytes = max(self._largest_bytes, nbytes)

    def read(self, params: Sequence[int], done: Event) -> None:
        """Records that an op which reads the gradients of these parameters was issued. `done`: event at the end of the
        op."""
        with self._lock:
            self._issued.append((done, params))

    @property
    def full(self) -> bool:
        """Whether there is no memory left for one more gradient of the size of the largest gradient so far. At most
        half of the memory for gradients is kept free for it; otherwise, with one very large gradient, the backward
        would wait for every read of a gradient."""
        return (
            bool(self._bytes) and self._held_bytes + min(self._largest_bytes, self._room_bytes // 2) > self._room_bytes
        )

    def wait_for_oldest(self) -> bool:
        """Waits until the oldest issued op that reads gradients is done, and stops counting those gradients that no
        other op will read. Returns False if no such op was issued."""
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
        """Removes all gradients from the count, because they were used or dropped."""
        with self._lock:
            self._held_bytes = 0
            self._bytes.clear()
            self._issued.clear()
