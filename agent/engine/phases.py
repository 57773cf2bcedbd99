"""Records the phases of the training thread (forward, backward, update …) and what each of them costs.

Phases partition wall time: a phase ends where the next one begins.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from tidegate.timeline.step_result import StepPhases
from tidegate.timeline.timeline import Phase, PhaseSpan

SHORT_SECONDS = 1e-3
"""Minimum duration of a phase `other`, in seconds, for which the peak of device memory is read. Reading the peak takes
longer than everything else at a phase boundary. Memory that is allocated in a shorter phase counts for the next
phase."""


class PhaseRecorder:
    """Records the phases of one training thread, whose hooks call it. `current` may be read from any thread."""

    def __init__(self, take_peak_bytes: Callable[[], int]) -> None:
        self.current: Phase = "other"
        self.take_peak_bytes = take_peak_bytes
        """Function that returns the highest use of device memory since its last call, in bytes, on the optimizer's
        present device."""
        self._since = time.monotonic()
        self._cpu = time.process_time()
        self._first_gradient: float | None = None
        self._reset()

    def enter(self, phase: Phase) -> None:
        """Begins the phase now; does nothing when it is the current one."""
        if phase != self.current:
            self._close()
            self.current = phase

    def began_at(self, moment: float | None, before: Phase) -> None:
        """Moves the beginning of the current phase to `moment` (seconds on the monotonic clock). The time before it
        counts for the phase `before`, and not as time in which the engine blocks the training thread.

        Used when the device lags behind the host and so reaches the current phase later. Does nothing if `moment` is
        None, or if the beginning would move by less than `SHORT_SECONDS`.
        """
        if moment is not None and moment - self._since > SHORT_SECONDS:
            self.blocked(self._since - moment)
            self._spans.append(PhaseSpan(before, self._since, moment))
            self._since = moment

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Context manager: enters `phase` at the beginning of its block, and the previous phase again at the end."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def exposed(self) -> _ExposedTime:
        """Context manager: time inside it counts as time in which the engine blocks the training thread."""
        return _ExposedTime(self)

    def blocked(self, seconds: float) -> None:
        """Counts `seconds` as time in which the engine blocks the training thread, in the current phase."""
        self._exposed[self.current] += seconds

    def waited_for_update(self, start: float, end: float) -> None:
        """Records that from `start` to `end` the training thread waited, in the current phase, for the update of the
        step before. A shorter wait than `SHORT_SECONDS` is left out. This time also counts in `blocked`."""
        if end - start > SHORT_SECONDS:
            self._waits.append(PhaseSpan(self.current, start, end))

    def gradient_arrived(self, moment: float) -> None:
        """Records that a gradient arrived at `moment` in the current phase. Only the first gradient of a phase is
        recorded."""
        if self._first_gradient is None or self._first_gradient < self._since:
            self._first_gradient = moment

    def end_step(self) -> StepPhases:
        """Ends the current step now. Returns its phases: all that was recorded since the end of the last step."""
        self._close()
        done = StepPhases(
            tuple(self._spans), dict(self._cpu_by_phase), dict(self._peaks), dict(self._exposed), self.cpu_seconds,
            first_gradient=self._first_gradient, single_node_share=self.single_node_share,
            waits_for_update=tuple(self._waits),
        )  # fmt: skip
        self._reset()
        return done

    def so_far(self) -> tuple[PhaseSpan, ...]:
        """The phases since the end of the last step, including the current phase up to now. May be called from any
        thread: no two phases overlap, but the recorded beginning of the current phase may be a moment too late."""
        spans = tuple(self._spans)
        # At a boundary, `_close` appends the span before it sets `_since`.
        since = max(self._since, spans[-1].end) if spans else self._since
        return (*spans, PhaseSpan(self.current, since, max(since, time.monotonic())))

    def _reset(self) -> None:
        self._spans: list[PhaseSpan] = []
        self._cpu_by_phase: dict[Phase, float] = defaultdict(float)
        self._peaks: dict[Phase, int] = {}
        self._exposed: dict[Phase, float] = defaultdict(float)
        self._waits: list[PhaseSpan] = []
        self.cpu_seconds = 0.0
        """CPU seconds that the recording has cost since the end of the last step."""
        self._first_gradient = None
        self.single_node_share = 0.0
        """Largest share of the parameters' elements whose gradients come from a single node of the autograd graph, in
        the newest backward pass."""

    def _close(self) -> None:
        began = time.thread_time()
        now, cpu = time.monotonic(), time.process_time()
        if now > self._since:
            self._spans.append(PhaseSpan(self.current, self._since, now))
        self._cpu_by_phase[self.current] += cpu - self._cpu
        if self.current != "other" or now - self._since > SHORT_SECONDS:
            self._peaks[self.current] = max(self._peaks.get(self.current, 0), self.take_peak_bytes())
        self._since, self._cpu = now, cpu
        self.cpu_seconds += time.thread_time() - began


class _ExposedTime:
    """Context manager that counts the time inside it as time in which the engine blocks the training thread. A class,
    because it is entered once per gradient and a generator would cost three times as much."""

    __slots__ = ("_clock", "_since")

    def __init__(self, clock: PhaseRecorder) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clock.blocked(time.monotonic() - self._since)
