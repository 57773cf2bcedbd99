"""Replay: simulates the ops of a measured step, to compare expected with measured times."""

from __future__ import annotations

from dataclasses import replace

from tidegate.plan.ops import GATE_OF, Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.timeline import PhaseSpan, Span, Timeline


def replay(measured: Timeline, rates: RateCard) -> Timeline:
    """The simulated timeline of a measured step on a machine with `rates`: same ops, lanes, order and dependencies.

    The forward, the length of the backward and the arrival of each gradient are taken from the measurement; the
    simulator does not predict them. Seconds are since the origin of `measured`, so that both timelines can be drawn on
    one axis. An op that was repeated runs once. ConfigError when a rate is not known that an op needs.
    """
    began = measured.window("backward") or measured.window("update") or (0.0, 0.0)
    step_at = (measured.window("update") or (began[1], began[1]))[0]
    first: dict[int, Span] = {}
    for span in sorted(measured.spans, key=lambda span: (span.start, span.op)):
        first.setdefault(span.op, span)
    ops = tuple(_op(span, tuple(d for d in measured.deps.get(span.op, ()) if d in first)) for span in first.values())
    plan = Plan(
        policy="interleaved",
        subgroups=(),
        placements=(),
        num_slots=0,
        ops=ops,
        paths=tuple(dict.fromkeys(op.path for op in ops if op.path is not None)),
    )
    ready = {s.subgroup: s.start - began[0] for s in first.values() if GATE_OF.get(s.kind) == "gradient"}
    simulated = simulate(plan, rates, step_at=step_at - began[0], gradient_ready=ready, step=measured.step)
    end = max([step_at, *(span.end + began[0] for span in simulated.spans)])
    return replace(
        simulated,
        spans=tuple(s._replace(start=s.start + began[0], end=s.end + began[0]) for s in simulated.spans),
        phases=(*(p for p in measured.phases if p.end <= step_at), PhaseSpan("update", step_at, end)),
        origin=measured.origin,
    )


def _op(span: Span, deps: tuple[int, ...]) -> Op:
    on_path = span.kind in (OpKind.FETCH, OpKind.FLUSH)
    return Op(
        id=span.op,
        kind=span.kind,
        subgroup=span.subgroup,
        nbytes=span.nbytes,
        numel=span.numel,
        deps=deps,
        slot=span.slot,
        path=span.lane.rpartition(":")[0] if on_path else None,
    )
