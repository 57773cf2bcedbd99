"""Sums over the spans of a finished step, from which its report and its metrics are computed."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.kernels.arithmetic.span_sums import SpanTable, bytes_of_kind, link_totals, measured_work
from tidegate.kernels.arithmetic.stall_analysis import exposed_waits
from tidegate.plan.ops import Content, OpKind
from tidegate.speeds.rate_card import MeasuredWork
from tidegate.timeline.bytes_by_phase import TransferTotal
from tidegate.timeline.gradient_arrival import GradientArrival, gradient_arrival_of
from tidegate.timeline.step_record import FinishedStep
from tidegate.timeline.timeline import Phase


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over the spans of one finished step.

    work: amount and busy seconds of each rate.
    links: bytes and busy seconds of the copies between host and device, by direction, content and phase.
    waits: stalls of the update in seconds, by cause.
    gradient_arrival: statistics of how the step's gradients became available.
    """

    work: MeasuredWork
    links: dict[tuple[str, Content, Phase], TransferTotal]
    waits: dict[str, float]
    gradient_arrival: GradientArrival


def step_sums(step: FinishedStep) -> StepSums:
    """Computes the sums of one step. This runs after every training step and must be fast."""
    result, phases = step.result, step.phases
    spans = SpanTable(result.spans)
    waited = SpanTable(result.waited_spans) if result.plan.deferred_flushes else spans
    return StepSums(
        measured_work(spans),
        link_totals(spans, phases.with_tail),
        exposed_waits(waited, step.deps, step.monotonic_timeline.window("update")),
        gradient_arrival_of(result, phases, *bytes_of_kind(spans, OpKind.GRAD_D2H, result.num_dropped)),
    )
