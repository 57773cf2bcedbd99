"""How late ops begin, by lane: what no lane, dependency or gate accounts for."""

from __future__ import annotations

import pytest

from tidegate.plan.ops import OpKind
from tidegate.speeds.dispatch_latency import StepTrace, dispatch_latencies
from tidegate.speeds.live_rates import LATE_STEPS, LiveRates
from tidegate.timeline.timeline import Span

CALLED = 10.0


def span(op: int, kind: OpKind, lane: str, start: float, end: float) -> Span:
    return Span(op, kind, lane, 0, start, end, 100, 100)


def ran(late: float = 0.25) -> StepTrace:
    """A norm, two updates on the CPU of which the second follows at once but for `late`, and the copy of a weight."""
    second = 12.0 + late
    return StepTrace(
        (
            span(0, OpKind.GRAD_D2H, "d2h", 8.0, 9.0),  # before the step: its gate is nobody's fault
            span(1, OpKind.NORM, "device", 10.5, 11.0),  # it could begin when step() was called, or before
            span(2, OpKind.CPU_UPDATE, "cpu", 11.0 + late, 12.0),  # waits for the norm
            span(3, OpKind.CPU_UPDATE, "cpu", second, second + 1),  # for its lane
            span(4, OpKind.WEIGHT_H2D, "h2d", second + 1.5, second + 2),  # for the update
            span(5, OpKind.FLUSH, "nvme:write", second + 5, second + 6),  # lanes of paths run ahead
        ),
        {0: (), 1: (), 2: (0, 1), 3: (), 4: (3,), 5: (3,)},
        CALLED,
    )


def test_an_op_is_late_by_what_nothing_of_the_plan_accounts_for() -> None:
    assert dispatch_latencies([ran()]) == {"cpu": 0.25, "h2d": 0.5}
    assert dispatch_latencies([]) == {}


def test_one_step_that_waited_long_does_not_count() -> None:
    assert dispatch_latencies([ran(), ran(), ran(5.0)])["cpu"] == 0.25


def test_live_rates_have_it_beside_them() -> None:
    """Busy seconds do not contain it. Only the last steps count."""
    live = LiveRates()
    seen = {"cpu_params_per_second": (200, 2.0)}
    live.observe(seen)
    assert live.card is not None
    assert live.card.op_seconds == {}
    for late in (0.5, *[0.125] * LATE_STEPS):
        live.observe(seen, ran(late))
    assert live.card.op_seconds == {"cpu": pytest.approx(0.125), "h2d": pytest.approx(0.5)}
    assert live.card.cpu_params_per_second == 100.0


def test_a_lane_that_waits_for_nothing_any_longer_keeps_what_was_seen() -> None:
    """With all on the CPU nothing of the device's lane waits: strides would be looked at as if it were never late."""
    live, seen = LiveRates(), {"cpu_params_per_second": (200, 2.0)}
    live.observe(seen, ran())
    assert live.card is not None
    for _ in range(LATE_STEPS):
        live.observe(seen, StepTrace(ran().spans[:2], {0: (), 1: ()}, CALLED))
    assert live.card.op_seconds == {"cpu": 0.25, "h2d": 0.5}
