"""Canary analysis: decides from measured steps whether a knob change on trial helps or harms. Pure functions.

The steps with the change are compared with the steps before it (`tidegate/comparison.py`). The comparison is made for
the whole step, which may become slower where knobs do not act directly, and for its exposed part, which Tidegate causes
and which is far less noisy than the model's own computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Final, NamedTuple

from tidegate.comparison import Comparison, compare
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.wire.canary import CanaryMeasure, CanaryState

MIN_STEPS_BEFORE: Final = 5
UNCOUNTED_STEPS: Final = 1
"""Number of steps left out at the beginning of a generation: the first step moves state, and is not representative."""
EARLY_SHARE, EARLY_RATIO = 4, 1.5
"""Limits for ending a trial early. A trial ends when 1/`EARLY_SHARE` of its steps (at least 3) have run, and each of
them took more than `EARLY_RATIO` times as long as the slowest step before the change."""


class StepOfAllRanks(NamedTuple):
    """One step over all ranks: the times of the slowest rank, and the smallest free share of device memory at the peak.

    `free_share` is None where the memory's size is unknown. In the database a step is a JSON array.
    """

    seconds: float
    exposed_seconds: float
    update_seconds: float
    free_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A trial of a knob change.

    base: the generation before the change. steps: how many steps are compared. min_effect: smallest change that counts,
    as a share of the step time. min_headroom: share of device memory that must stay free. before: the steps before the
    change; they are stored with the trial, so that a restart of the daemon does not end it.
    """

    base: int
    steps: int
    min_effect: float
    min_headroom: float
    before: tuple[StepOfAllRanks, ...]
    state: CanaryState = "waiting"
    verdict: str = ""
    predicted_before: float | None = None
    predicted_after: float | None = None
    measured: CanaryMeasure | None = None

    @property
    def open(self) -> bool:
        """Whether the trial has not ended yet."""
        return self.state in ("waiting", "condemned")

    def closed(self, state: CanaryState, verdict: str) -> Canary:
        """A copy of the trial that has ended with this state. An existing verdict is kept. A trial that has already
        ended is returned unchanged."""
        return replace(self, state=state, verdict=self.verdict or verdict) if self.open else self


def common_steps(ranks: Iterable[tuple[Iterable[StepFigures], int | None]], *, first: int = 0) -> list[StepOfAllRanks]:
    """The steps with numbers from `first` on that every rank has reported, oldest first. Steps that a rank has skipped,
    or without an update time, are left out.

    ranks: the steps of each rank, and the size of its device memory in bytes.
    """
    tables = [({s.step: s for s in steps if s.step >= first}, memory) for steps, memory in ranks]
    if not tables:
        return []
    shared = sorted(set.intersection(*(set(table) for table, _ in tables)))
    rows = [[(table[number], memory) for table, memory in tables] for number in shared]
    return [_combine(row) for row in rows if all(s.update_seconds is not None and not s.skipped for s, _ in row)]


def _combine(row: Sequence[tuple[StepFigures, int | None]]) -> StepOfAllRanks:
    shares = [1 - s.peak_bytes / memory for s, memory in row if memory and s.peak_bytes is not None]
    return StepOfAllRanks(
        seconds=max(s.seconds for s, _ in row),
        exposed_seconds=max(s.exposed_seconds for s, _ in row),
        update_seconds=max(s.update_seconds or 0.0 for s, _ in row),
        free_share=min(shares, default=None),
    )


def judge(canary: Canary, after: Sequence[StepOfAllRanks]) -> Canary:
    """The canary with its verdict; the unchanged canary if there are too few steps for a verdict.

    after: the steps with the change, from the first one on.
    """
    seen = after[UNCOUNTED_STEPS : UNCOUNTED_STEPS + canary.steps]
    if canary.state != "waiting" or not seen:
        return canary
    short = _short_of_memory(canary, seen)
    early = len(seen) >= max(3, canary.steps // EARLY_SHARE) and min(s.seconds for s in seen) > EARLY_RATIO * max(
        s.seconds for s in canary.before
    )
    if not short and not early and len(seen) < canary.steps:
        return canary
    whole, exposed = compared = compare_steps(canary.before, seen)
    measured = measure(canary.before, seen, compared)
    least = canary.min_effect * whole.median_before
    # Variation of the model's own computation, for example on a shared machine, is no effect of knobs.
    spread = interquartile_range([s.seconds for s in canary.before])
    effect = exposed.difference(least)
    slower = "slower" in (effect, whole.difference(max(least, spread)))
    details = f"{_in_words(measured)}; {_against_prediction(canary, measured)}"
    if short:
        return replace(canary, state="condemned", verdict=f"Harmful: {short}; {details}.", measured=measured)
    if early or slower:
        return replace(canary, state="condemned", verdict=f"Harmful: {details}.", measured=measured)
    what = "Helpful" if effect == "faster" else "No clear difference"
    return replace(canary, state="promoted", verdict=f"{what}: {details}.", measured=measured)


def interquartile_range(values: Sequence[float]) -> float:
    """The difference between the third and the first quartile; 0 for fewer than two values."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (0.0, 0.0, 0.0)
    return high - low


def compare_steps(before: Sequence[StepOfAllRanks], after: Sequence[StepOfAllRanks]) -> tuple[Comparison, Comparison]:
    """Compares whole steps, and their exposed parts, before and after the change; both sides need at least one step."""
    whole = compare([s.seconds for s in before], [s.seconds for s in after])
    return whole, compare([s.exposed_seconds for s in before], [s.exposed_seconds for s in after])


def measure(
    before: Sequence[StepOfAllRanks], after: Sequence[StepOfAllRanks], compared: tuple[Comparison, Comparison]
) -> CanaryMeasure:
    """The figures of a comparison by `compare_steps`, as a message."""
    whole, exposed = compared
    shares = [s.free_share for s in after if s.free_share is not None]
    return CanaryMeasure(
        steps_before=len(before),
        steps_after=len(after),
        step_seconds_before=whole.median_before,
        step_seconds_after=whole.median_after,
        exposed_seconds_before=exposed.median_before,
        exposed_seconds_after=exposed.median_after,
        update_seconds_before=median(s.update_seconds for s in before),
        update_seconds_after=median(s.update_seconds for s in after),
        step_shift=whole.shift_share,
        step_score=whole.score,
        exposed_shift=exposed.shift / max(whole.median_before, 1e-9),
        exposed_score=exposed.score,
        headroom=min(shares, default=None),
    )


def _in_words(m: CanaryMeasure) -> str:
    return (
        f"a step (forward, backward and update) took {m.step_seconds_after:.4g} s, "
        f"{m.step_seconds_before:.4g} s before ({m.step_shift:+.1%}); "
        f"exposed {m.exposed_seconds_after:.4g} s, {m.exposed_seconds_before:.4g} s before "
        f"({m.exposed_shift:+.1%} of a step); {m.steps_after} steps against {m.steps_before}"
    )


def _short_of_memory(canary: Canary, after: Sequence[StepOfAllRanks]) -> str:
    """A clause for the verdict if the change has left less than `min_headroom` of device memory free; else "".

    Also "" if less than `min_headroom` was free before the change, or if the size of the memory is unknown.
    """
    before = min((s.free_share for s in canary.before if s.free_share is not None), default=None)
    now = min((s.free_share for s in after if s.free_share is not None), default=None)
    if before is None or now is None or now >= canary.min_headroom or before < canary.min_headroom:
        return ""
    return f"{max(now, 0):.1%} of device memory was free at the peak, at least {canary.min_headroom:.0%} is needed"


def _against_prediction(canary: Canary, measured: CanaryMeasure) -> str:
    was, now = measured.update_seconds_before, measured.update_seconds_after
    found = f"update {was:.4g} s before, {now:.4g} s after"
    if canary.predicted_before is None or canary.predicted_after is None:
        return f"{found}, not predicted"
    return f"{found}, predicted {canary.predicted_before:.4g} s and {canary.predicted_after:.4g} s"
