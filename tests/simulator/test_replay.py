"""A measured step in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.simulator.test_simulate import H100, plan_of, plans
from tidegate.errors import ConfigError
from tidegate.plan import Plan
from tidegate.simulator.replay import replay
from tidegate.simulator.simulate import simulate
from tidegate.timeline.timeline import PhaseSpan, Timeline


def later(timeline: Timeline, seconds: float) -> Timeline:
    """The same step with a forward before it."""
    return replace(
        timeline,
        source="measured",
        origin=17.0,
        spans=tuple(s._replace(start=s.start + seconds, end=s.end + seconds) for s in timeline.spans),
        phases=(
            PhaseSpan("forward", 0.0, seconds),
            *(replace(p, start=p.start + seconds, end=p.end + seconds) for p in timeline.phases),
        ),
    )


microseconds = st.integers(0, 3_000_000).map(lambda count: count / 1e6)  # finer ones are ties after an addition


@given(plan=plans, step_at=microseconds, forward=microseconds)
@settings(max_examples=examples(60))
def test_what_the_simulator_made_it_expects_again(plan: Plan, step_at: float, forward: float) -> None:
    ready = {subgroup.id: step_at * subgroup.id / len(plan.subgroups) for subgroup in plan.subgroups}
    made = later(simulate(plan, H100, step_at=step_at, gradient_ready=ready, step=5), forward)
    found = replay(made, H100)
    assert (found.step, found.source, found.origin) == (5, "simulated", 17.0)
    assert [(s.op, s.lane) for s in found.spans] == [(s.op, s.lane) for s in made.spans]
    times = [edge for span in found.spans for edge in (span.start, span.end)]
    assert times == pytest.approx([edge for span in made.spans for edge in (span.start, span.end)], abs=1e-9)
    assert found.window("update") == pytest.approx(made.window("update"), abs=1e-9)


def test_slower_lanes_make_a_longer_update_and_gradients_stay_where_they_were() -> None:
    made = later(simulate(plan_of(8, 2, 0.0), H100, step_at=1.0), 0.5)
    slow = replay(made, replace(H100, cpu_params_per_second=1e9))
    (start, end), measured = slow.window("update") or (0, 0), made.window("update") or (0, 0)
    assert start == measured[0]
    assert end > 1.5 * (measured[1] - measured[0]) + start
    arrived = {s.op: s.start for s in made.spans if s.kind == "grad_d2h"}
    assert {s.op: s.start for s in slow.spans if s.kind == "grad_d2h"} == pytest.approx(arrived)


def test_an_op_that_was_repeated_runs_once() -> None:
    made = simulate(plan_of(2, 2, 0.0), H100, step_at=1.0)
    again = replace(made, source="measured", spans=(*made.spans, made.spans[0]._replace(start=9.0, end=9.1)))
    assert len(replay(again, H100).spans) == len(made.spans)


def test_a_rate_that_is_not_known_is_named() -> None:
    made = simulate(plan_of(2, 2, 0.0), H100, step_at=1.0)
    with pytest.raises(ConfigError, match="cpu_params_per_second"):
        replay(made, replace(H100, cpu_params_per_second=None))
