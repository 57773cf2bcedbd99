"""Which phase the training thread is in. Phases partition wall time: one ends where the next begins."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from tidegate.timeline.timeline import Phase, PhaseSpan

SHORT_SECONDS = 1e-3
"""The time between two phases, `other`, has a memory peak of its own only if it lasts longer: asking the device costs
more than everything else at a boundary, and what little is allocated there counts to the phase that follows."""


@dataclass(frozen=True)
class StepPhases:
    """The phases of one step, on the monotonic clock, with what was measured at their boundaries."""

    spans: tuple[PhaseSpan, ...]
    cpu_seconds: dict[Phase, float]
    device_peak_bytes: dict[Phase, int]
    exposed_seconds: dict[Phase, float]
    clock_cpu_seconds: float = 0.0
    """What these boundaries cost: CPU time of the training thread."""
    tail: tuple[PhaseSpan, ...] = ()
    """Phases of the next step in which this step's update went on. They count for the next step; here they only say
    in which phase bytes moved."""

    logged: dict[str, float] = field(default_factory=dict)
    """What the training loop said of the step: `AdamW.log`."""
    first_gradient: float | None = None
    """When the first gradient of the step's last backward pass came, by the host's clock."""
    handed_together: float = 0.0
    """Share of the parameters whose gradients one node of that backward's graph hands over."""

    @property
    def with_tail(self) -> tuple[PhaseSpan, ...]:
        return self.spans + self.tail

    def seconds(self) -> dict[Phase, float]:
        total: dict[Phase, float] = defaultdict(float)
        for span in self.spans:
            total[span.phase] += span.end - span.start
        return dict(total)


class PhaseClock:
    """Driven by hooks of one training thread; `current` may be read from any thread."""

    def __init__(self, take_peak_bytes: Callable[[], int]) -> None:
        self.current: Phase = "other"
        self.take_peak_bytes = take_peak_bytes
        """Of the device that is worked on now."""
        self._since = time.monotonic()
        self._cpu = time.process_time()
        self._first_gradient: float | None = None
        self.handed_together = 0.0
        """Of the newest backward pass; see `StepPhases`."""
        self._reset()

    def enter(self, phase: Phase) -> None:
        """The phase begins now; nothing happens when it is the current one."""
        if phase != self.current:
            self._close()
            self.current = phase

    def began_at(self, moment: float | None, before: Phase) -> None:
        """The present phase, which a device that is behind the host enters later, began at `moment`: until then it was
        `before`, and the engine blocked nobody. Nothing happens for None, or where it makes no difference."""
        if moment is not None and moment - self._since > SHORT_SECONDS:
            self.blocked(self._since - moment)
            self._spans.append(PhaseSpan(before, self._since, moment))
            self._since = moment

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """`phase` for a while, then back to what was."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def exposed(self) -> _Exposed:
        """A context: the training thread is blocked by the engine inside it."""
        return _Exposed(self)

    def blocked(self, seconds: float) -> None:
        """The training thread was blocked so long, in the present phase."""
        self._exposed[self.current] += seconds

    def gradient_came(self, moment: float) -> None:
        """A gradient came at this moment, in the present phase."""
        if self._first_gradient is None or self._first_gradient < self._since:
            self._first_gradient = moment

    def cut(self) -> StepPhases:
        """Ends the step now: what was measured since the last cut."""
        self._close()
        done = StepPhases(
            tuple(self._spans), dict(self._cpu_by_phase), dict(self._peaks), dict(self._exposed), self.cpu_seconds,
            first_gradient=self._first_gradient, handed_together=self.handed_together,
        )  # fmt: skip
        self._reset()
        return done

    def so_far(self) -> tuple[PhaseSpan, ...]:
        """The phases since the last cut, the present one as far as it got. From any thread: none overlaps another,
        though the present one may miss its first moments."""
        spans = tuple(self._spans)
        # At a boundary the span is noted first.
        since = max(self._since, spans[-1].end) if spans else self._since
        return (*spans, PhaseSpan(self.current, since, max(since, time.monotonic())))

    def _reset(self) -> None:
        self._spans: list[PhaseSpan] = []
        self._cpu_by_phase: dict[Phase, float] = defaultdict(float)
        self._peaks: dict[Phase, int] = {}
        self._exposed: dict[Phase, float] = defaultdict(float)
        self.cpu_seconds = 0.0
        """What this clock has cost since the last cut."""
        self._first_gradient = None
        self.handed_together = 0.0

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


class _Exposed:
    """Entered once per gradient: a generator would cost three times as much."""

    __slots__ = ("_clock", "_since")

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clock.blocked(time.monotonic() - self._since)
