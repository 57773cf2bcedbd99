"""Filter of a noisy speed measurement: smooths noise, follows lasting drops fast and rises slowly, ignores outliers."""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.125
"""Weight of the newest step in the exponential average: noise of ±10 % per step leaves about ±1.5 %, far less than the
gain that a new split must promise."""
OUTLIER_DEVIATION: Final = 0.25
"""Relative deviation above which a step is not noise; a single such step is ignored as an outlier."""
FALL_STEPS: Final = 2
"""Number of consecutive steps slower by more than OUTLIER_DEVIATION after which the newest of them is the new speed."""
LITTLE_FALL_STEPS: Final = 8
"""The same for steps with few and small transfers: there, waits with another cause count for more than bytes do."""
RISE_STEPS: Final = 4
"""Number of consecutive steps faster by more than OUTLIER_DEVIATION after which the estimate rises."""
IDLE_RISE_STEPS: Final = 16
"""Number of consecutive faster steps after which the estimate rises, if the path is idle for most of the step. While a
slow path delays the step, the other paths have few requests and answer them immediately. Their estimates must not rise
before the slow path is known to be slower."""
MAX_RISE_FACTOR: Final = 2.0
"""Largest factor by which the estimated speed may rise in one step."""
MIN_RISE_STEPS: Final = 8
"""Number of steps that a rise must last. After a rise that did not last, further rises are ignored for
`IGNORED_RISE_STEPS` steps; after the next such rise for twice as many, up to `MAX_IGNORED_RISE_STEPS`."""
IGNORED_RISE_STEPS: Final = 16
MAX_IGNORED_RISE_STEPS: Final = 512


class SpeedFilter:
    """The filtered speed of one path, as seconds per byte, because times of several parts add up and rates do not.

    A path that is throttled, or has a cache, answers its first requests immediately: with little load it looks fast,
    and with more load it is slow. So rises are accepted gradually, and after a false rise the next rise must wait
    longer. Deterministic, not thread-safe.
    """

    def __init__(self, seconds_per_byte: float) -> None:
        self.seconds_per_byte = seconds_per_byte
        self._in_a_row = 0
        """Number of consecutive steps that were much slower (positive) or much faster (negative)."""
        self._step = 0
        self._rose_at = -MIN_RISE_STEPS
        self._distrust = IGNORED_RISE_STEPS
        self._no_rise_before = 0

    def observe(self, least: float, most: float, *, rested: bool = False, little: bool = False) -> None:
        """Adds one step, in which the path took from `least` to `most` seconds per byte. An estimate within that range
        stays as it is; otherwise the nearer end of the range counts as the measured value.

        rested: by its estimated speed, the path was idle for most of the step. Then a rise needs more steps
        (IDLE_RISE_STEPS). little: the step moved too little on the path to show its speed. Then a fall needs more steps
        (LITTLE_FALL_STEPS).
        """
        self._step += 1
        measured = min(max(self.seconds_per_byte, least), most)
        side = self._side(measured)
        if not side:
            self.seconds_per_byte += SMOOTHING * (measured - self.seconds_per_byte)
            self._in_a_row = 0
        elif side < 0 and self._step < self._no_rise_before:
            self._in_a_row = 0
        else:
            self._in_a_row = self._in_a_row + side if self._in_a_row * side > 0 else side
            if self._in_a_row >= (LITTLE_FALL_STEPS if little else FALL_STEPS):
                self._fall(measured)
            elif -self._in_a_row >= (IDLE_RISE_STEPS if rested else RISE_STEPS):
                self._rise(measured)

    def _fall(self, measured: float) -> None:
        self.seconds_per_byte, self._in_a_row = measured, 0
        if self._step - self._rose_at < MIN_RISE_STEPS:
            self._no_rise_before = self._step + self._distrust
            self._distrust = min(2 * self._distrust, MAX_IGNORED_RISE_STEPS)

    def _rise(self, measured: float) -> None:
        self._rose_at = self._step
        # The count of consecutive steps is kept: if the speed is higher still, the next step need not be confirmed
        # again.
        self.seconds_per_byte = max(measured, self.seconds_per_byte / MAX_RISE_FACTOR)

    def _side(self, measured: float) -> int:
        """1 if the speed is slower than the estimate by more than OUTLIER_DEVIATION, -1 if it is faster, else 0."""
        ratio = measured / self.seconds_per_byte
        return (ratio > 1 + OUTLIER_DEVIATION) - (ratio < 1 / (1 + OUTLIER_DEVIATION))
