"""What ops take in the steps of an engine, beyond what the same work takes by itself.

A lane's thread waits for a core and for the interpreter, finds caches as others have left them, and more than one other
lane at work: none of that shows where a lane works alone, or two of them.
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
from tidegate.speeds.dispatch_latency import Ran, late_seconds
from tidegate.speeds.rate_card import NAME_OF, RateCard, rate_name
from tidegate.timeline.timeline import Span

LANE_RATES: Final = {
    CPU: NAME_OF[OpKind.CPU_UPDATE],
    DEVICE: NAME_OF[OpKind.DEVICE_UPDATE],
    H2D: NAME_OF[OpKind.STATE_H2D],
    D2H: NAME_OF[OpKind.STATE_D2H],
}
"""The rate whose ops have a cost of their own on each lane. Norms are on the device's lane, too: one in a step."""
NORM_RATE: Final = NAME_OF[OpKind.NORM]
MOST_FACTOR: Final = 2.0
"""Of what ops take in steps by what they take alone: what is beyond that is not believed. Nor is less than once: no
lane moves faster in company, and a copy is never faster than what it is paced to. Storage may: it has bursts, and rests
in steps."""
PASSES: Final = 2
"""Reads and writes of a path are in each other's way, so that what one takes depends on what the other does."""
MIN_SPREAD: Final = 0.2
"""By which share ops must differ in size to tell what each costs from what its bytes cost."""


@dataclass(frozen=True)
class Step:
    """One step that an engine took: its plan, its spans, and when `step()` was called and returned, in the seconds of
    the spans. backward_seconds: from the first moment in which an op could run until then."""

    plan: Plan
    spans: Sequence[Span]
    called: float
    returned: float
    backward_seconds: float

    @property
    def ran(self) -> Ran:
        return Ran(self.spans, {op.id: op.deps for op in self.plan.ops}, self.called)


@dataclass(frozen=True)
class _Taken:
    """Ops of one rate in one step: how many there are, their seconds by the card and as measured."""

    ops: int
    expected: float
    measured: float


def corrected(card: RateCard, steps: Sequence[Step]) -> RateCard:
    """The card with which ops and steps take as long as in these, of plans with subgroups of at least two sizes.

    For each lane: what its ops cost however small they are, and a factor for its rate. `step_seconds` is what is left.
    Steps with paths say something of the paths' lanes alone.
    """
    memory = [step for step in steps if not step.plan.paths]
    bare = replace(card, step_seconds=0.0)
    better = _fitted(bare, memory, LANE_RATES, late_seconds(step.ran for step in memory))
    norms = [step[NORM_RATE] for step in (_taken(step, bare) for step in memory) if NORM_RATE in step]
    if norms:
        # Alone, norms are of one size and find nothing in a cache: steps may well be faster.
        factor = median(one.measured / one.expected for one in norms)
        better = better.with_rates({NORM_RATE: (card.rate(NORM_RATE) or 0.0) / factor})
    for path in card.paths:
        mine, lanes = [step for step in steps if path in step.plan.paths], {lane: lane for lane in path_lanes(path)}
        for _ in range(PASSES if mine else 0):
            better = _fitted(better, mine, lanes, {}, least=1 / MOST_FACTOR)
        alone = {lane: rate for lane in lanes if (rate := card.rate(lane)) is not None}
        better = better.with_rates({
            lane: min(MOST_FACTOR * rate, max(rate / MOST_FACTOR, better.rate(lane) or rate))
            for lane, rate in alone.items()
        })  # fmt: skip
    left = median(step.returned - step.called - _update_seconds(step, better) for step in memory)
    return replace(better, step_seconds=max(0.0, left))


def _fitted(
    card: RateCard, steps: Sequence[Step], lanes: Mapping[str, str], late: Mapping[str, float], least: float = 1.0
) -> RateCard:
    """With rates and costs of these lanes (and the names of their rates) as in `steps`."""
    seen = [_taken(step, card) for step in steps]
    rates: dict[str, float] = {}
    costs = dict(card.op_seconds)
    for lane, name in lanes.items():
        found, rate = [step[name] for step in seen if name in step], card.rate(name)
        if not found or rate is None:
            continue
        fixed = (card.overhead_seconds or 0.0) + costs.get(lane, 0.0)
        each, factor = _fit(found, fixed, least)
        rates[name] = rate / factor
        costs[lane] = max(0.0, factor * fixed + each + late.get(lane, 0.0) - (card.overhead_seconds or 0.0))
    return replace(card.with_rates(rates), op_seconds=costs)


def _fit(found: Sequence[_Taken], fixed: float, least: float) -> tuple[float, float]:
    """Seconds that each op costs beside its `fixed` ones, and what all else is multiplied with: the line with the
    median of the slopes between all pairs (Theil-Sen), which a few odd steps do not move."""
    points = [(one.ops / one.expected, one.measured / one.expected) for one in found]
    slopes = [(y - v) / (x - u) for (x, y), (u, v) in combinations(points, 2) if not isclose(x, u, rel_tol=MIN_SPREAD)]
    if not slopes:  # subgroups of one size alone
        return median((one.measured - one.expected) / one.ops for one in found), 1.0
    each = max(-fixed, median(slopes))
    return each, min(MOST_FACTOR, max(least, median(y - each * x for x, y in points)))


def _update_seconds(step: Step, card: RateCard) -> float:
    update = simulate(step.plan, card, step_at=step.backward_seconds).phases[-1]
    return update.end - update.start


def _taken(step: Step, card: RateCard) -> dict[str, _Taken]:
    expected = _sums(simulate(step.plan, card, step_at=step.backward_seconds).spans)
    return {
        name: _Taken(count, expected[name][1], seconds)
        for name, (count, seconds) in _sums(step.spans).items()
        if name in expected and expected[name][1]
    }


def _sums(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """Ops and seconds of each rate."""
    found: dict[str, tuple[int, float]] = {}
    for span in spans:
        name = rate_name(span)
        count, seconds = found.get(name, (0, 0.0))
        found[name] = (count + 1, seconds + span.end - span.start)
    return found
