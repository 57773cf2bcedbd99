"""Splits large copies into pieces, and limits the bytes that a lane has enqueued. The copy engine of a GPU does the
enqueued copies of one direction one after the other, on whatever stream they are. So a small copy of the framework (a
loss, the next batch) waits for all bytes that a lane has enqueued in the same direction."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tidegate.agent.devices.base import Copy
from tidegate.agent.devices.cuda_runtime import Marker

PIECE_BYTES: Final = 64 << 20
"""Maximum size of a piece. `bench/copies.py` compares the cost of a piece with the time that other copies wait for
it."""
QUEUED_BYTES: Final = 2 * PIECE_BYTES
"""Maximum number of bytes that a lane has enqueued. With two pieces, the next piece is enqueued before the copy engine
has finished, even if its host thread is late by the duration of one piece (1.2 ms on PCIe 5)."""


def in_pieces(copies: Sequence[Copy], most: int = PIECE_BYTES) -> Iterator[list[Copy]]:
    """Splits copies into pieces, lists of copies with at most `most` bytes together. Bytes and their order stay the
    same."""
    piece: list[Copy] = []
    room = most
    for copy in copies:
        start = 0
        while start < copy.nbytes:
            nbytes = min(room, copy.nbytes - start)
            piece.append(Copy(copy.dst + start, copy.src + start, nbytes))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


class QueuedCopies:
    """The pieces that a lane has enqueued and has not waited for. May be used by several threads."""

    def __init__(self, wait: Callable[[Marker], None], most: int = QUEUED_BYTES) -> None:
        """wait: function that blocks the calling thread until a marker is reached."""
        self._wait, self._most = wait, most
        self._lock = threading.Lock()
        self._pieces: deque[tuple[Marker, int]] = deque()
        self._bytes = 0

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest pieces until `nbytes` more bytes may be enqueued. One piece is always allowed."""
        while True:
            with self._lock:
                if not self._pieces or self._bytes + nbytes <= self._most:
                    return
                marker, done = self._pieces.popleft()
                self._bytes -= done
            self._wait(marker)

    def add(self, marker: Marker, nbytes: int) -> None:
        """Notes a piece of `nbytes` that was enqueued before `marker`. Small pieces count as one, up to half of what
        may be enqueued, so that few markers are kept."""
        with self._lock:
            self._bytes += nbytes
            if self._pieces and self._pieces[-1][1] + nbytes <= self._most // 2:
                nbytes += self._pieces.pop()[1]
            self._pieces.append((marker, nbytes))
