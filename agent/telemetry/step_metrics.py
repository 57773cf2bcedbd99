"""Updates the metrics of /metrics from a finished step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tidegate.agent.telemetry.metric_store import Labels, MetricStore
from tidegate.plan.ops import path_lanes
from tidegate.timeline.step_record import FinishedStep, PathSample
from tidegate.timeline.timeline import PHASES, STALL_CAUSES
from tidegate.wire.step import StepReport, moved_by

MIN_CEILING_BYTES: Final = 1 << 20
"""Minimum number of bytes that a link must transfer in a step before its speed in that step can raise the link's
ceiling (the best measured speed)."""


def initialize(metrics: MetricStore, num_steps: int, paths: Collection[str]) -> None:
    """Creates counters and histograms with the value zero before the first step: Prometheus does not count the value
    that a series begins with. `num_steps`: number of the last step. `paths`: the run's storage paths."""
    metrics.set_value("tidegate_step", num_steps)
    for phase in PHASES:
        metrics.create_histogram("tidegate_phase_seconds", phase)
    for name in ("steps", "skipped_steps", "tokens", "update_spill_seconds"):
        metrics.add(f"tidegate_{name}_total", 0)
    causes = [cause for cause in STALL_CAUSES if cause not in ("lock", "collective")]
    for cause in (*causes, *(lane for path in paths for lane in path_lanes(path))):
        metrics.add("tidegate_stall_seconds_total", 0.0, "update", cause)


def add_step(
    metrics: MetricStore, step: FinishedStep, report: StepReport, predicted_seconds: Mapping[str, float]
) -> float | None:
    """Adds a finished step to the metrics. `predicted_seconds`: forecast of each phase. Returns the relative error of
    the forecast of the update, |predicted - measured| / measured; None without a forecast or for a skipped step."""
    _step(metrics, report)
    _links(metrics, report)
    _paths(metrics, step.paths, report)
    _memory(metrics, report)
    for processor, numel in report.update_params.items():
        metrics.add("tidegate_update_params_total", numel, processor)
    metrics.set_series("tidegate_subgroups", {(where,): count for where, count in report.subgroups.items()})
    return _prediction(metrics, report, predicted_seconds)


def set_forecast(metrics: MetricStore, seconds: Mapping[str, float]) -> None:
    """Sets the forecast of each phase of the next step, in seconds."""
    metrics.set_series("tidegate_predicted_phase_seconds", _by_label(seconds))


def _step(metrics: MetricStore, report: StepReport) -> None:
    """Updates the metrics of step counts, phases, stalls, loss and gradient norm."""
    metrics.set_value("tidegate_step", report.step)
    metrics.add("tidegate_steps_total", 1)
    metrics.add("tidegate_skipped_steps_total", int(report.skipped))
    metrics.add("tidegate_tokens_total", report.tokens or 0)
    metrics.set_value("tidegate_step_timestamp_seconds", report.timestamp)
    if report.loss is not None:  # often logged only every few steps: the last value is kept
        metrics.set_value("tidegate_loss", report.loss)
    metrics.set_value("tidegate_grad_norm", report.grad_norm)
    for phase, seconds in report.phase_seconds.items():
        metrics.observe("tidegate_phase_seconds", seconds, phase, step=report.step, timestamp=report.timestamp)
    for phase, seconds in report.exposed_seconds.items():
        metrics.add("tidegate_exposed_seconds_total", seconds, phase)
    for phase, seconds in report.cpu_seconds.items():
        metrics.add("tidegate_cpu_seconds_total", seconds, phase)
    for stall in report.stalls:
        metrics.add("tidegate_stall_seconds_total", stall.seconds, stall.phase, stall.cause)
    metrics.add("tidegate_update_spill_seconds_total", report.spill_seconds)


def _links(metrics: MetricStore, report: StepReport) -> None:
    """Updates the metrics of the link between host and device: bytes, busy time and best speed."""
    for link in report.links:
        metrics.add("tidegate_link_bytes_total", link.bytes, link.direction, link.phase, link.content)
        metrics.add("tidegate_link_busy_seconds_total", link.busy_seconds, link.direction, link.phase)
    ceilings: dict[Labels, float] = dict(metrics.rows("tidegate_link_ceiling_bytes_per_second"))
    for direction, (nbytes, seconds) in moved_by(report.links, lambda link: link.direction).items():
        if nbytes >= MIN_CEILING_BYTES and seconds > 0:
            ceilings[(direction,)] = max(ceilings.get((direction,), 0.0), nbytes / seconds)
    metrics.set_series("tidegate_link_ceiling_bytes_per_second", ceilings)


def _paths(metrics: MetricStore, samples: Sequence[PathSample], report: StepReport) -> None:
    """Updates the metrics of storage paths: bytes, busy time, free space and write rate."""
    for row in report.paths:
        metrics.add("tidegate_path_bytes_total", row.bytes, row.path, row.operation, row.phase)
        metrics.add("tidegate_path_busy_seconds_total", row.busy_seconds, row.path, row.operation, row.phase)
    for sample in samples:
        for operation, transfer in sample.moves:
            if transfer.nbytes and transfer.is_whole:
                metrics.observe(
                    "tidegate_path_operation_seconds", transfer.end - transfer.start, sample.path, operation
                )
    states = report.path_states
    free: dict[Labels, float] = {(s.path,): s.free_bytes for s in states if s.free_bytes is not None}
    metrics.set_series("tidegate_path_free_bytes", free)
    metrics.set_series(
        "tidegate_path_ceiling_bytes_per_second",
        {(s.path, operation): speed for s in states for operation, speed in s.ceiling_bytes_per_second.items()},
    )
    wear = {state.path: state.written_bytes_per_day for state in states}
    metrics.set_series(
        "tidegate_path_written_bytes_per_day", {(path,): rate for path, rate in wear.items() if rate is not None}
    )


def _memory(metrics: MetricStore, report: StepReport) -> None:
    metrics.set_series("tidegate_device_memory_peak_bytes", _by_label(report.device_memory_peak_bytes))
    metrics.set_series("tidegate_host_memory_bytes", _by_label(report.host_memory_bytes))


def _by_label(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(label,): value for label, value in values.items()}


def _prediction(metrics: MetricStore, report: StepReport, predicted_seconds: Mapping[str, float]) -> float | None:
    """Sets the metric with the relative error of each phase's forecast. Returns the error of the update; None without a
    forecast. For a skipped step it changes nothing and returns None."""
    if report.skipped:
        return None
    # The part of an update that overlaps the next forward counts as update.
    measured = {**report.phase_seconds, "update": report.phase_seconds.get("update", 0.0) + report.spill_seconds}
    errors = {
        phase: abs(predicted - measured[phase]) / measured[phase]
        for phase, predicted in predicted_seconds.items()
        if predicted and measured.get(phase)
    }
    last = {phase: error for (phase,), error in metrics.rows("tidegate_prediction_error_ratio").items()}
    metrics.set_series("tidegate_prediction_error_ratio", _by_label({**last, **errors}))
    return errors.get("update")
