"""Fit of the rate card to measured steps: how much longer ops take inside a step of the engine than alone.

In a step the thread of a lane waits for a core and for the interpreter lock, runs with caches that other threads have
filled, and works beside several other lanes. Measurements of one lane alone, or of two, show none of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isclose
from statistics import median
from typing import Final

from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, OpKind, path_lanes
from tidegate.plan.plan import Plan
from tidegate.simulator.simulate import simulate
from tidegate.speeds.dispatch_latency import StepTrace, dispatch_latencies
from tidegate.speeds.rate_card import RATE_NAME_OF, RateCard, rate_name
from tidegate.timeline.timeline import Span

LANE_RATES: Final = {
    CPU: RATE_NAME_OF[OpKind.CPU_UPDATE],
    DEVICE: RATE_NAME_OF[OpKind.DEVICE_UPDATE],
    H2D: RATE_NAME_OF[OpKind.STATE_H2D],
    D2H: RATE_NAME_OF[OpKind.STATE_D2H],
}
"""The rate that is fitted for each lane, together with a fixed cost per op. The norm, one op per step on the device's
lane, has a rate of its own (NORM_RATE)."""
NORM_RATE: Final = RATE_NAME_OF[OpKind.NORM]
MAX_FACTOR: Final = 2.0
"""Largest accepted ratio of the time of ops within steps to their time alone, for each lane; a larger ratio is replaced
by this one. A ratio below 1 is replaced by 1, because no lane is faster while other lanes work. Storage paths are an
exception, because they have bursts, and pauses within a step: their smallest ratio is 1/MAX_FACTOR."""
ITERATIONS: Final = 2
"""Number of iterations of the fit for a path: reads and writes slow each other down, so their rates depend on each
other."""
MIN_SPREAD: Final = 0.2
"""Smallest relative difference in op size at which the cost per op can be separated from the cost per byte."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step of the engine: its plan, its spans, and when `step()` was called and returned, on the clock of
    the spans. backward_seconds: from the first moment at which an op could run until the call of `step()`."""

    plan: Plan
    spans: Sequence[Span]
    called: float
    returned: float
    backward_seconds: float

    @property
    def trace(self) -> StepTrace:
        return StepTrace(self.spans, {op.id: op.deps for op in self.plan.ops}, self.called)


@dataclass(frozen=True)
class _OpTotals:
    """Totals of the ops in one step whose speed one rate of the rate card gives: the number of these ops, their
    simulated seconds (`expected`), and their measured seconds."""

    ops: int
    expected: float
    measured: float


def fitted_card(card: RateCard, steps: Sequence[MeasuredStep]) -> RateCard:
    """The rate card with which simulated ops and steps take as long as in the measured `steps`.

    The plans of the steps must have subgroups of at least two sizes. Fitted for each lane: a fixed cost per op, and a
    factor for its rate. `step_seconds` of the card is the part of `step()` that the simulated ops do not explain. From
    steps with storage paths, only the lanes of the paths are fitted.
    """
    memory = [step for step in steps if not step.plan.paths]
    bare = replace(card, step_seconds=0.0)
    better = _fitted(bare, memory, LANE_RATES, dispatch_latencies(step.trace for step in memory))
    norms = [totals[NORM_RATE] for totals in (_op_totals(step, bare) for step in memory) if NORM_RATE in totals]
    if norms:
        # Norms were measured alone with one size and cold caches: in steps they may well be faster. A norm reads
        # gradients, and is never slower than an update, which reads the state, too. Time beyond that does not depend
        # on the size: on a GPU a norm ends with a small copy, which waits for other copies. That is in `step_seconds`.
        factor = median(norm.measured / norm.expected for norm in norms)
        least = better.rate(LANE_RATES[DEVICE]) or 0.0
        better = better.with_rates({NORM_RATE: max(least, (card.rate(NORM_RATE) or 0.0) / factor)})
    for path in card.paths:
        of_path, lanes = [step for step in steps if path in step.plan.paths], {lane: lane for lane in path_lanes(path)}
        for _ in range(ITERATIONS if of_path else 0):
            better = _fitted(better, of_path, lanes, {}, least=1 / MAX_FACTOR)
        alone = {lane: rate for lane in lanes if (rate := card.rate(lane)) is not None}
        better = better.with_rates({
            lane: min(MAX_FACTOR * rate, max(rate / MAX_FACTOR, better.rate(lane) or rate))
            for lane, rate in alone.items()
        })  # fmt: skip
    left = median(step.returned - step.called - _update_seconds(step, better) for step in memory)
    return replace(better, step_seconds=max(0.0, left))


def _fitted(
    card: RateCard,
    steps: Sequence[MeasuredStep],
    lanes: Mapping[str, str],
    late: Mapping[str, float],
    least: float = 1.0,
) -> RateCard:
    """`card` with rates and costs per op fitted to `steps`, for these lanes.

    lanes: name of the rate of each lane. late: dispatch latency of each lane in seconds. least: smallest accepted ratio
    of time in steps to time alone.
    """
    totals = [_op_totals(step, card) for step in steps]
    rates: dict[str, float] = {}
    costs = dict(card.op_seconds)
    for lane, name in lanes.items():
        of_rate, rate = [by_rate[name] for by_rate in totals if name in by_rate], card.rate(name)
        if not of_rate or rate is None:
            continue
        fixed = (card.overhead_seconds or 0.0) + costs.get(lane, 0.0)
        each, factor = _fit(of_rate, fixed, least)
        rates[name] = rate / factor
        costs[lane] = max(0.0, factor * fixed + each + late.get(lane, 0.0) - (card.overhead_seconds or 0.0))
    return replace(card.with_rates(rates), op_seconds=costs)


def _fit(totals: Sequence[_OpTotals], fixed: float, least: float) -> tuple[float, float]:
    """Fits a line to measured op times. Returns the seconds to add for each op (beyond `fixed`), and the factor by
    which the simulated time of the op is multiplied.

    The slope of the line is the median of the slopes between all pairs of points (Theil-Sen estimator), so that a few
    outliers have little influence. least: smallest factor that is returned, unless all subgroups have the same size;
    then the factor is 1.
    """
    points = [(of_step.ops / of_step.expected, of_step.measured / of_step.expected) for of_step in totals]
    slopes = [(y - v) / (x - u) for (x, y), (u, v) in combinations(points, 2) if not isclose(x, u, rel_tol=MIN_SPREAD)]
    if not slopes:  # all subgroups have the same size
        return median((of_step.measured - of_step.expected) / of_step.ops for of_step in totals), 1.0
    each = max(-fixed, median(slopes))
    return each, min(MAX_FACTOR, max(least, median(y - each * x for x, y in points)))


def _update_seconds(step: MeasuredStep, card: RateCard) -> float:
    update = simulate(step.plan, card, step_at=step.backward_seconds).phases[-1]
    return update.end - update.start


def _op_totals(step: MeasuredStep, card: RateCard) -> dict[str, _OpTotals]:
    """The totals of the ops in `step`, by name of the rate that gives their speed. card: used to simulate the step."""
    expected = _sums(simulate(step.plan, card, step_at=step.backward_seconds).spans)
    return {
        name: _OpTotals(count, expected[name][1], seconds)
        for name, (count, seconds) in _sums(step.spans).items()
        if name in expected and expected[name][1]
    }


def _sums(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """The number of ops in `spans`, and the sum of their seconds, by name of the rate that gives their speed."""
    sums: dict[str, tuple[int, float]] = {}
    for span in spans:
        name = rate_name(span)
        count, seconds = sums.get(name, (0, 0.0))
        sums[name] = (count + 1, seconds + span.end - span.start)
    return sums
