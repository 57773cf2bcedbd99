"""Computes the report of a finished step, which is also the source of the counters at /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.agent.telemetry.step_sums import StepSums, step_sums
from tidegate.plan import OpKind
from tidegate.plan.ops import Content
from tidegate.speeds.rate_card import RATE_OF, MeasuredWork
from tidegate.timeline.bytes_by_phase import TransferTotal, start_of, totals_by_phase
from tidegate.timeline.gradient_arrival import GradientArrival
from tidegate.timeline.stall_analysis import causes_of_wait
from tidegate.timeline.step_record import FinishedStep, PathSample
from tidegate.timeline.timeline import DISPATCH, Phase, PhaseSpan
from tidegate.timeline.verdict import SKIPPED, UpdateFigures, verdict
from tidegate.wire.step import PathState, StepReport, moved_by


def report_of(step: FinishedStep, sums: StepSums | None = None) -> StepReport:
    """Computes the report of one step. It includes the verdict: a sentence that says what the update waited for
    longest, and what to change. `sums`: the step's `step_sums`; None if they are not known yet."""
    phases, result, tokens = step.phases, step.result, step.phases.logged.get("tokens")
    if sums is None:
        sums = step_sums(step)
    # pydantic validates dicts in one call, which takes half the time of creating an object for each row.
    report = StepReport.model_validate(
        {
            "step": step.number,
            "timestamp": step.timestamp,
            "phase_seconds": phases.seconds(),
            "exposed_seconds": phases.exposed_seconds,
            "stalls": _stall_rows(step, sums.waits),
            "spill_seconds": max(0.0, result.update_end - phases.spans[-1].end),
            "links": _link_rows(sums.links),
            "paths": _path_rows(step.paths, phases.with_tail) if step.paths else (),
            "path_states": [PathState.model_validate(sample, from_attributes=True) for sample in step.paths],
            "device_memory_peak_bytes": phases.device_peak_bytes,
            "host_memory_bytes": step.host_bytes,
            "cpu_seconds": {phase: max(0.0, seconds) for phase, seconds in phases.cpu_seconds.items()},
            "update_params": _updated(sums.work),
            "subgroups": step.subgroups,
            "loss": phases.logged.get("loss"),
            "tokens": None if tokens is None else int(tokens),
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
        }
    )
    text = SKIPPED if result.skipped else verdict(step_figures(report, sums.gradient_arrival), result.effective)
    return report.model_copy(update={"verdict": text})


def step_figures(report: StepReport, gradient_arrival: GradientArrival) -> UpdateFigures:
    """Collects the figures of one step that `verdict` needs for its sentence, which says what the update waited for
    longest. `gradient_arrival`: statistics of how the step's gradients became available."""
    links = moved_by((row for row in report.links if row.phase == "update"), lambda row: row.direction)
    paths = moved_by((row for row in report.paths if row.phase == "update"), lambda row: f"{row.path}:{row.operation}")
    return UpdateFigures(
        step_seconds=sum(report.phase_seconds.values()) + report.spill_seconds,
        update_seconds=report.phase_seconds.get("update", 0.0) + report.spill_seconds,
        stalls={row.cause: row.seconds for row in report.stalls if row.phase == "update"},
        lanes=links | paths,
        ceilings={
            f"{state.path}:{operation}": speed
            for state in report.path_states
            for operation, speed in state.ceiling_bytes_per_second.items()
        },
        updated=report.update_params,
        paths=[state.path for state in report.path_states if not state.retired],
        recopied=gradient_arrival.recopied,
        first_gradient=gradient_arrival.first_gradient,
        together=gradient_arrival.single_node_share,
    )


def _stall_rows(step: FinishedStep, waits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Stall seconds of a step, by phase and cause. In the update: time in which nothing computes (`waits`, by cause).
    In other phases: time in which hooks block the training thread. If they wait for the update of the step before, as
    for its deferred flushes, the cause is what that update waited for."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for cause, waited in waits.items():
        seconds["update", cause] += waited
    for phase, exposed in step.phases.exposed_seconds.items():
        if phase != "update":
            seconds[phase, DISPATCH] += exposed
    _add_waits_for_update(step, seconds)
    return [{"phase": phase, "cause": cause, "seconds": value} for (phase, cause), value in seconds.items()]


def _add_waits_for_update(step: FinishedStep, seconds: dict[tuple[str, str], float]) -> None:
    """Divides the time in which the training thread waited for the update of the step before among what that update
    waited for. In `seconds`, this time counts for `dispatch` before the call. Waits in the phase `update` are left out:
    `StepSums.waits` has them."""
    before = step.previous_result
    if before is None:
        return
    spans, deps = before.spans[before.num_dropped :], {op.id: op.deps for op in before.plan.ops}
    for wait in step.phases.waits_for_update:
        for cause, waited in causes_of_wait(wait, spans, deps).items():
            if wait.phase != "update" and cause != DISPATCH:
                moved = min(waited, seconds[wait.phase, DISPATCH])
                seconds[wait.phase, cause] += moved
                seconds[wait.phase, DISPATCH] -= moved


def _link_rows(totals: Mapping[tuple[str, Content, Phase], TransferTotal]) -> list[dict[str, Any]]:
    """Bytes and busy time of the link between host and device, by direction, phase and content (gradient, weight or
    state)."""
    return [
        {
            "direction": lane, "phase": phase, "content": content, "bytes": total.nbytes,
            "busy_seconds": total.seconds,
        }
        for (lane, content, phase), total in totals.items()
    ]  # fmt: skip


def _path_rows(samples: Sequence[PathSample], phases: Sequence[PhaseSpan]) -> list[dict[str, Any]]:
    """Bytes and busy time by path, operation and phase."""
    moves = [((sample.path, operation), transfer) for sample in samples for operation, transfer in sample.moves]
    return [
        {"path": path, "operation": operation, "phase": phase, "bytes": total.nbytes, "busy_seconds": total.seconds}
        for ((path, operation), phase), total in totals_by_phase(sorted(moves, key=start_of), phases).items()
    ]


def _updated(work: MeasuredWork) -> dict[str, int]:
    """Number of parameters updated on the CPU and on the device."""
    rates = {"cpu": RATE_OF[OpKind.CPU_UPDATE], "device": RATE_OF[OpKind.DEVICE_UPDATE]}
    return {processor: work[rate][0] if rate in work else 0 for processor, rate in rates.items()}
