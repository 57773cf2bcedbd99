"""Large copies in pieces: a copy engine does one after the other, whichever streams they are on, and what the framework
copies meanwhile (a loss, the next batch) waits for one piece instead of a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tidegate.agent.devices.base import Copy

PIECE_BYTES: Final = 64 << 20
"""`bench/copies.py` holds what a piece costs against how long others wait for it."""


def in_pieces(copies: Sequence[Copy], most: int = PIECE_BYTES) -> list[Copy]:
    """The same bytes in the same order, none of them more than `most`."""
    return [piece for copy in copies for piece in _pieces(copy, most)]


def _pieces(copy: Copy, most: int) -> Iterator[Copy]:
    for start in range(0, copy.nbytes, most):
        yield Copy(copy.dst + start, copy.src + start, min(most, copy.nbytes - start))
