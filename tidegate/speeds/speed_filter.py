"""A speed that is known, and what steps show of it: what is believed at once, after a while, and not at all."""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.125
"""Weight of the newest step: noise of ±10 % a step leaves about ±1.5 %, far less than a move must promise."""
JUMP: Final = 0.25
"""A step that is off by more is no noise, and alone it is forgotten."""
FALL_STEPS: Final = 2
"""Steps in a row that must be that much slower before the newest of them is the new speed."""
RISE_STEPS: Final = 4
"""Steps in a row that must be that much faster."""
RESTED_RISE_STEPS: Final = 16
"""As many, while the path has so little to do that it rests: while one path holds a step up the others serve what they
get at once, and must not be taken for faster before that one is known to be slower."""
RISE: Final = 2.0
"""How many times as fast as known a path may be taken for in one step."""
BELIEVED: Final = 8
"""Steps that a rise must last. After one that did not, no other is believed for `DISTRUST` steps, then for twice as
many, up to `MOST_DISTRUST`."""
DISTRUST: Final = 16
MOST_DISTRUST: Final = 512


class Settling:
    """Seconds per byte: times add up, rates do not. Deterministic, not thread-safe.

    A path that is throttled, or has a cache, serves its first bytes at once: while it gets little it looks fast, and
    once it gets more it is slow. So a rise is believed by degrees, and one that did not last makes the next one wait.
    """

    def __init__(self, seconds_per_byte: float) -> None:
        self.seconds_per_byte = seconds_per_byte
        self._in_a_row = 0
        """Steps that were much slower, counted up from 0, or much faster, counted down."""
        self._step = 0
        self._rose_at = -BELIEVED
        self._distrust = DISTRUST
        self._no_rise_before = 0

    def observe(self, least: float, most: float, *, rested: bool = False) -> None:
        """A step showed that it takes from `least` to `most` seconds per byte; what is known may be in between.

        rested: it had so little to do that, as fast as it is known, it rested for most of the step.
        """
        self._step += 1
        seen = min(max(self.seconds_per_byte, least), most)
        side = self._side(seen)
        if not side:
            self.seconds_per_byte += SMOOTHING * (seen - self.seconds_per_byte)
            self._in_a_row = 0
        elif side < 0 and self._step < self._no_rise_before:
            self._in_a_row = 0
        else:
            self._in_a_row = self._in_a_row + side if self._in_a_row * side > 0 else side
            if self._in_a_row >= FALL_STEPS:
                self._fall(seen)
            elif -self._in_a_row >= (RESTED_RISE_STEPS if rested else RISE_STEPS):
                self._rise(seen)

    def _fall(self, seen: float) -> None:
        self.seconds_per_byte, self._in_a_row = seen, 0
        if self._step - self._rose_at < BELIEVED:
            self._no_rise_before = self._step + self._distrust
            self._distrust = min(2 * self._distrust, MOST_DISTRUST)

    def _rise(self, seen: float) -> None:
        self._rose_at = self._step
        # Where that is not all of it, the next step need not be confirmed again: the row goes on.
        self.seconds_per_byte = max(seen, self.seconds_per_byte / RISE)

    def _side(self, seen: float) -> int:
        """1 for much slower than known, -1 for much faster, 0 for as known."""
        ratio = seen / self.seconds_per_byte
        return (ratio > 1 + JUMP) - (ratio < 1 / (1 + JUMP))
