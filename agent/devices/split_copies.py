"""Splits large copies into pieces. The copy engine of a GPU runs one copy after the other, even if they are on
different streams. With pieces, a copy of the framework (a loss, the next batch) waits for one piece and not for a
gigabyte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.agent.devices.base import Copy

PIECE_BYTES: Final = 64 << 20
"""Maximum size of a piece. `bench/copies.py` compares the cost of a piece with the time that other copies wait for
it."""


def in_pieces(copies: Sequence[Copy], most: int = PIECE_BYTES) -> list[Copy]:
    """Splits copies into copies of at most `most` bytes. Bytes and their order stay the same."""
    return [
        Copy(copy.dst + start, copy.src + start, min(most, copy.nbytes - start))
        for copy in copies
        for start in range(0, copy.nbytes, most)
    ]
