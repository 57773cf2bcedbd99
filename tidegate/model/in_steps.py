"""What ops take in the steps of an engine, beyond what the same work takes by itself.

A lane's thread waits for a core and for the interpreter, finds caches as others have left them, and more than one other
lane at work: none of that shows where a lane works alone, or two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import StatisticsError, linear_regression, median
from typing import Final

from tidegate.model.rates import NAME_OF, RateCard
from tidegate.model.simulate import simulate
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, OpKind
from tidegate.plan.plan import Plan
from tidegate.timeline import Span

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
lane moves faster in company, and a copy is never faster than what it is paced to."""


@dataclass(frozen=True)
class Step:
    """One step that an engine took: its plan, its spans, and when `step()` was called and returned, in the seconds of
    the spans. backward_seconds: from the first moment in which an op could run until then."""

    plan: Plan
    spans: Sequence[Span]
    called: float
    returned: float
    backward_seconds: float


@dataclass(frozen=True)
class _Taken:
    """Ops of one rate in one step: how many there are, their seconds by the card and as measured, and how long they
    waited when nothing of the plan held them up."""

    ops: int
    expected: float
    measured: float
    late: float


def corrected(card: RateCard, steps: Sequence[Step]) -> RateCard:
    """The card with which ops and steps take as long as in these, of plans with subgroups of at least two sizes.

    For each lane: what its ops cost however small they are, and a factor for its rate. `step_seconds` is what is left.
    """
    bare = replace(card, step_seconds=0.0)
    seen = [_taken(step, bare) for step in steps]
    rates: dict[str, float] = {}
    costs = dict(card.op_seconds)
    for lane, name in LANE_RATES.items():
        found = [step[name] for step in seen if name in step]
        if not found:
            continue
        each, factor = _fit(found)
        rates[name] = getattr(card, name) / factor
        # A stream waits on the device for another; what its lane's thread is late by is not time in which it works.
        late = median(one.late / one.ops for one in found) if lane == CPU else 0.0
        fixed = (card.overhead_seconds or 0.0) + costs.get(lane, 0.0)
        costs[lane] = max(0.0, factor * fixed + each + late - (card.overhead_seconds or 0.0))
    norms = [step[NORM_RATE] for step in seen if NORM_RATE in step]
    if norms:
        # Alone, norms are of one size and find nothing in a cache: steps may well be faster.
        rates[NORM_RATE] = getattr(card, NORM_RATE) / median(one.measured / one.expected for one in norms)
    better = replace(bare, **rates, op_seconds=costs)  # type: ignore[arg-type]
    left = median(step.returned - step.called - _update_seconds(step, better) for step in steps)
    return replace(better, step_seconds=max(0.0, left))


def _fit(found: Sequence[_Taken]) -> tuple[float, float]:
    """Seconds that each op costs, and what all else is multiplied with."""
    ops_by_expected = [one.ops / one.expected for one in found]
    shares = [one.measured / one.expected for one in found]
    try:
        each, factor = linear_regression(ops_by_expected, shares)
    except StatisticsError:  # subgroups of one size alone
        each, factor = median((one.measured - one.expected) / one.ops for one in found), 1.0
    if each < 0:  # then it is the rate alone
        each, factor = 0.0, median(shares)
    return each, min(MOST_FACTOR, max(1.0, factor))


def _update_seconds(step: Step, card: RateCard) -> float:
    update = simulate(step.plan, card, step_at=step.backward_seconds).phases[-1]
    return update.end - update.start


def _taken(step: Step, card: RateCard) -> dict[str, _Taken]:
    expected = _sums(simulate(step.plan, card, step_at=step.backward_seconds).spans)
    measured, late, counts = _sums(step.spans), _late(step), dict[str, int]()
    for span in step.spans:
        name = NAME_OF.get(span.kind)
        if name is not None:
            counts[name] = counts.get(name, 0) + 1
    return {
        name: _Taken(count, expected[name], measured[name], late.get(name, 0.0))
        for name, count in counts.items()
        if expected.get(name)
    }


def _sums(spans: Iterable[Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in spans:
        name = NAME_OF.get(span.kind)
        if name is not None:
            found[name] = found.get(name, 0.0) + span.end - span.start
    return found


def _late(step: Step) -> dict[str, float]:
    """Seconds between when ops could begin and when they did, of those that nothing but lanes and ops held up, which is
    only known of what could not begin before `step()`; by rate."""
    ends: Mapping[int, float] = {span.op: span.end for span in step.spans}
    found: dict[str, float] = {}
    lane_ends: dict[str, float] = {}
    for span in sorted(step.spans, key=lambda span: span.start):
        op = step.plan.by_id[span.op]
        could = max(
            lane_ends.get(span.lane, step.called), step.called, *(ends.get(dep, step.called) for dep in op.deps)
        )
        lane_ends[span.lane] = max(span.end, lane_ends.get(span.lane, span.end))
        name = NAME_OF.get(span.kind)
        if name is not None and could > step.called:
            found[name] = found.get(name, 0.0) + max(0.0, span.start - could)
    return found
