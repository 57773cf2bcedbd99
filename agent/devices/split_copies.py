"""Splits large copies into pieces. A copy engine runs one copy after the other, whichever stream they are on. So a copy
of the framework (a loss, the next batch) waits for one piece instead of a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tidegate.agent.devices.base import Copy

PIECE_BYTES: Final = 64 << 20
"""Largest piece. `bench/copies.py` compares the cost of a piece with the time that other copies wait for it."""


def in_pieces(copies: Sequence[Copy], most: int = PIECE_BYTES) -> list[Copy]:
    """The same bytes in the same order, as copies of at most `most` bytes."""
    return [piece for copy in copies for piece in _pieces(copy, most)]


def _pieces(copy: Copy, most: int) -> Iterator[Copy]:
    for start in range(0, copy.nbytes, most):
        yield Copy(copy.dst + start, copy.src + start, min(most, copy.nbytes - start))
