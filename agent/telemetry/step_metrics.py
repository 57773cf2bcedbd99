"""What a finished step adds to the figures of /metrics: one call of the meter for each family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tidegate.agent.telemetry.metric_store import Labels, Meter
from tidegate.agent.telemetry.paths import PathNote
from tidegate.agent.telemetry.step_record import FinishedStep
from tidegate.plan.ops import path_lanes
from tidegate.timeline.timeline import STALL_CAUSES
from tidegate.wire.step import StepReport

MIN_CEILING_BYTES: Final = 1 << 20
"""A step that copied less says nothing of what the link can do."""


def begin(meter: Meter, paths: Collection[str]) -> None:
    """Counters that are there, at zero, before anything has happened; `paths` are the run's storage paths."""
    meter.put_one("tidegate_steps_total", 0)
    for name in ("skipped_steps", "tokens", "update_spill_seconds"):
        meter.add(f"tidegate_{name}_total", 0)
    causes = [cause for cause in STALL_CAUSES if cause not in ("lock", "collective")]
    for cause in (*causes, *(lane for path in paths for lane in path_lanes(path))):
        meter.add("tidegate_stall_seconds_total", 0.0, "update", cause)


def add_step(
    meter: Meter, step: FinishedStep, report: StepReport, predicted_seconds: Mapping[str, float]
) -> float | None:
    """`predicted_seconds`: what was expected of each phase. Returns how wrong that of the update was, if one can tell:
    |predicted - measured| / measured."""
    _pace(meter, report)
    _links(meter, report)
    _paths(meter, step.paths, report)
    _memory(meter, report)
    for processor, numel in report.update_params.items():
        meter.add("tidegate_update_params_total", numel, processor)
    meter.put("tidegate_subgroups", {(where,): count for where, count in report.subgroups.items()})
    return _prediction(meter, report, predicted_seconds)


def expect(meter: Meter, seconds: Mapping[str, float]) -> None:
    """What is expected of each phase of the next step."""
    meter.put("tidegate_predicted_phase_seconds", _by_label(seconds))


def _pace(meter: Meter, report: StepReport) -> None:
    meter.put_one("tidegate_steps_total", report.step)
    meter.add("tidegate_skipped_steps_total", int(report.skipped))
    meter.add("tidegate_tokens_total", report.tokens or 0)
    meter.put_one("tidegate_step_timestamp_seconds", report.timestamp)
    if report.loss is not None:  # many log one every few steps: the last one stays
        meter.put_one("tidegate_loss", report.loss)
    meter.put_one("tidegate_grad_norm", report.grad_norm)
    for phase, seconds in report.phase_seconds.items():
        meter.observe("tidegate_phase_seconds", seconds, phase, step=report.step, timestamp=report.timestamp)
    for phase, seconds in report.exposed_seconds.items():
        meter.add("tidegate_exposed_seconds_total", seconds, phase)
    for phase, seconds in report.cpu_seconds.items():
        meter.add("tidegate_cpu_seconds_total", seconds, phase)
    for stall in report.stalls:
        meter.add("tidegate_stall_seconds_total", stall.seconds, stall.phase, stall.cause)
    meter.add("tidegate_update_spill_seconds_total", report.spill_seconds)


def _links(meter: Meter, report: StepReport) -> None:
    moved: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for link in report.links:
        meter.add("tidegate_link_bytes_total", link.bytes, link.direction, link.phase, link.content)
        meter.add("tidegate_link_busy_seconds_total", link.busy_seconds, link.direction, link.phase)
        moved[link.direction][0] += link.bytes
        moved[link.direction][1] += link.busy_seconds
    ceilings: dict[Labels, float] = dict(meter.rows("tidegate_link_ceiling_bytes_per_second"))
    for direction, (nbytes, seconds) in moved.items():
        if nbytes >= MIN_CEILING_BYTES and seconds > 0:
            ceilings[(direction,)] = max(ceilings.get((direction,), 0.0), nbytes / seconds)
    meter.put("tidegate_link_ceiling_bytes_per_second", ceilings)


def _paths(meter: Meter, notes: Sequence[PathNote], report: StepReport) -> None:
    for row in report.paths:
        meter.add("tidegate_path_bytes_total", row.bytes, row.path, row.operation, row.phase)
        meter.add("tidegate_path_busy_seconds_total", row.busy_seconds, row.path, row.operation, row.phase)
    for note in notes:
        for operation, transfer in note.moves:
            if transfer.nbytes and transfer.is_whole:
                meter.observe("tidegate_path_operation_seconds", transfer.end - transfer.start, note.name, operation)
    states = report.path_states
    free: dict[Labels, float] = {(s.path,): s.free_bytes for s in states if s.free_bytes is not None}
    meter.put("tidegate_path_free_bytes", free)
    meter.put(
        "tidegate_path_ceiling_bytes_per_second",
        {(s.path, operation): speed for s in states for operation, speed in s.ceiling_bytes_per_second.items()},
    )
    wear = {state.path: state.written_bytes_per_day for state in states}
    meter.put("tidegate_path_written_bytes_per_day", {(path,): rate for path, rate in wear.items() if rate is not None})


def _memory(meter: Meter, report: StepReport) -> None:
    meter.put("tidegate_device_memory_peak_bytes", _by_label(report.device_memory_peak_bytes))
    meter.put("tidegate_host_memory_bytes", _by_label(report.host_memory_bytes))


def _by_label(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(label,): value for label, value in values.items()}


def _prediction(meter: Meter, report: StepReport, predicted_seconds: Mapping[str, float]) -> float | None:
    if report.skipped:
        return None
    # What goes on in the next forward is the update's, too.
    measured = {**report.phase_seconds, "update": report.phase_seconds.get("update", 0.0) + report.spill_seconds}
    errors = {
        phase: abs(predicted - measured[phase]) / measured[phase]
        for phase, predicted in predicted_seconds.items()
        if predicted and measured.get(phase)
    }
    last = {phase: error for (phase,), error in meter.rows("tidegate_prediction_error_ratio").items()}
    meter.put("tidegate_prediction_error_ratio", _by_label({**last, **errors}))
    return errors.get("update")
