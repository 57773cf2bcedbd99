"""Metrics of the current state, read at each scrape. They make a long update or a hanging read visible before the step
has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import psutil

from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.telemetry.gpu import GpuFigures
from tidegate.agent.telemetry.metric_store import Labels, MetricStore
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.agent.tiers.transfers import PathCounters, Transfer
from tidegate.knobs.knobs import AUTO, EQ1, KnobValue, device_share, weights_of
from tidegate.metrics.family import LINK_REFUSALS, PATH_OPERATIONS
from tidegate.timeline.bytes_by_phase import Channel, start_of, totals_by_phase
from tidegate.timeline.timeline import PHASES, PhaseSpan

_WORK: Final = ("forward", "backward", "update")
"""Phases that count for `tidegate_step_open_seconds`: checkpoints and pauses between steps do not."""


@dataclass(frozen=True, kw_only=True)
class CurrentPath:
    """Current state of one storage path. Values that are measured once per step are not included."""

    counters: PathCounters
    lock_timeouts: int
    retired: bool
    lock_slots: int
    """Number of processes of the node that may use the path at once; 0 without exclusive access."""
    capacity_bytes: int
    """Capacity in bytes; 0 for a path without a known limit, or whose directory is gone."""
    wear_bytes_per_day: int
    """Limit of bytes written per day, from the settings; 0 for no limit."""


@dataclass(frozen=True, kw_only=True)
class CurrentState:
    """All values of a rank that change during a step. Times are on the monotonic clock."""

    now: float
    phases: tuple[PhaseSpan, ...]
    """Phases of the steps that are not recorded yet, in order; the last phase is still running."""
    step_seconds: float
    """Time so far of forward, backward and update of the present step."""
    paths: Mapping[str, CurrentPath]
    desired: Mapping[str, KnobValue]
    effective: Mapping[str, KnobValue]
    generation: int
    overhead_seconds: Mapping[str, float]
    device_capacity_bytes: int
    process_io_bytes: Mapping[str, int]
    """Bytes that this process has read from and written to storage, by operation (`read`, `write`). Empty where the
    kernel does not report them."""
    gpu: GpuFigures = field(default_factory=GpuFigures)
    thread_failures: int = 0
    """Number of failures of the threads that communicate with the daemon."""
    refused: str = ""
    """What the daemon refuses now: `token` or `rank`; empty for nothing."""


def read_current_state(
    optimizer: Optimizer, capacities: Mapping[str, int], generation: int, overhead: Mapping[str, float],
    gpu: GpuFigures, thread_failures: int = 0, refused: str = "",
) -> CurrentState:  # fmt: skip
    """Reads the current state; may be called from any thread. `capacities`: capacity of each path in bytes, read once
    at the start."""
    phases = optimizer._phases_so_far()
    return CurrentState(
        now=time.monotonic(),
        phases=phases,
        step_seconds=sum(p.end - p.start for p in optimizer.phases.so_far() if p.phase in _WORK),
        paths=_current_paths(optimizer.engine.store, capacities),
        desired=optimizer.knobs.as_dict(paths=optimizer.engine.store is not None),
        effective=optimizer.effective_knobs(),
        generation=generation,
        overhead_seconds=overhead,
        device_capacity_bytes=optimizer.device.capacity_bytes,
        process_io_bytes=_process_io(),
        gpu=gpu,
        thread_failures=thread_failures,
        refused=refused,
    )


def _process_io() -> dict[str, int]:
    """Bytes that this process has read from and written to storage; empty where the kernel does not report them."""
    try:
        counters = _process(os.getpid()).io_counters()
    except (psutil.Error, OSError):
        return {}
    return {"read": counters.read_bytes, "write": counters.write_bytes}


@lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    """psutil's object for this process. It is cached, because creating it takes longer than reading its counters.
    `pid`: id of this process, so that a forked child gets an object of its own."""
    return psutil.Process(pid)


def _current_paths(store: TierStore | None, capacities: Mapping[str, int]) -> dict[str, CurrentPath]:
    if store is None:
        return {}
    return {
        name: CurrentPath(
            counters=path.counters,
            lock_timeouts=path.lock_timeouts,
            retired=name in store.retired,
            capacity_bytes=capacities[name],
            lock_slots=path.lock_slots,
            wear_bytes_per_day=path.settings.wear_bytes_per_day if isinstance(path, StoragePath) else 0,
        )
        for name, path in store.paths.items()
    }


def update_metrics(metrics: MetricStore, current: CurrentState) -> None:
    """Sets all metrics of the current state."""
    open_phase = current.phases[-1]
    metrics.set_series(
        "tidegate_phase_open_seconds",
        {(phase,): current.now - open_phase.start if phase == open_phase.phase else 0.0 for phase in PHASES},
    )
    metrics.set_value("tidegate_step_open_seconds", current.step_seconds)
    metrics.set_value("tidegate_device_memory_capacity_bytes", current.device_capacity_bytes)
    metrics.set_series(
        "tidegate_agent_overhead_seconds_total", {(part,): s for part, s in current.overhead_seconds.items()}
    )
    metrics.set_value("tidegate_agent_thread_failures_total", current.thread_failures)
    metrics.set_series("tidegate_agent_refused", {(what,): float(what == current.refused) for what in LINK_REFUSALS})
    metrics.set_series(
        "tidegate_process_io_bytes_total", {(op,): nbytes for op, nbytes in current.process_io_bytes.items()}
    )
    _control(metrics, current)
    if current.paths:
        _paths(metrics, current)
        _transfers_in_progress(metrics, current)
    _gpu(metrics, current.gpu)


def _control(metrics: MetricStore, current: CurrentState) -> None:
    """Sets the metrics of knobs, generation and path shares."""
    states = (("desired", current.desired), ("effective", current.effective))
    metrics.set_series(
        "tidegate_knob",
        {(knob, state): number for state, knobs in states for knob, number in _as_numbers(knobs).items()},
    )
    metrics.set_value("tidegate_generation", current.generation)
    paths = tuple(current.paths)
    if paths:
        metrics.set_series(
            "tidegate_tier_share",
            {
                (path, state): share
                for state, knobs in states
                for path, share in _shares(knobs.get("tier_split", AUTO), paths).items()
            },
        )


def _as_numbers(knobs: Mapping[str, KnobValue]) -> dict[str, float]:
    """Knobs as numbers for metrics; those on `auto` are left out."""
    numbers = {"static_ratio": float(knobs["static_ratio"])}
    if knobs["stride"] != AUTO:
        numbers["device_share"] = device_share(knobs["stride"])  # type: ignore[arg-type]
    if (cache := knobs.get("host_cache", AUTO)) != AUTO:
        numbers["host_cache_bytes"] = float(cache)
    if (order := knobs.get("order", AUTO)) != AUTO:
        numbers["alternate_order"] = float(order == "alternate")
    return numbers


def _shares(tier_split: KnobValue, paths: Sequence[str]) -> dict[str, float]:
    """Share of the state that each path gets, according to the weights in the knob `tier_split`. Empty if the knob has
    no weights (with `auto` and `eq1`, measured speeds determine the shares), and if all weights are 0."""
    weights = {} if tier_split in (AUTO, EQ1) else weights_of(str(tier_split))
    total = sum(weights.values())
    return {path: weights.get(path, 0.0) / total for path in paths} if total else {}


def _paths(metrics: MetricStore, current: CurrentState) -> None:
    """Sets the metrics of storage paths: counters and limits."""
    paths = current.paths
    for counter in ("lock_wait_seconds", "errors", "retries"):
        rows: dict[Labels, float] = {
            (path, op): value for path, p in paths.items() for op, value in getattr(p.counters, counter).items()
        }
        metrics.set_series(f"tidegate_path_{counter}_total", rows)
    metrics.set_series("tidegate_path_lock_slots", {(path,): p.lock_slots for path, p in paths.items() if p.lock_slots})
    metrics.set_series("tidegate_path_lock_timeouts_total", {(path,): p.lock_timeouts for path, p in paths.items()})
    metrics.set_series(
        "tidegate_path_taken_over_bytes_total", {(path,): p.counters.taken_over_bytes for path, p in paths.items()}
    )
    metrics.set_series("tidegate_path_retired", {(path,): float(p.retired) for path, p in paths.items()})
    metrics.set_series(
        "tidegate_path_capacity_bytes", {(n,): p.capacity_bytes for n, p in paths.items() if p.capacity_bytes}
    )
    limits: dict[Labels, float] = {(n,): p.wear_bytes_per_day for n, p in paths.items() if p.wear_bytes_per_day}
    metrics.set_series("tidegate_path_wear_limit_bytes_per_day", limits)


def _transfers_in_progress(metrics: MetricStore, current: CurrentState) -> None:
    """Sets the metrics of transfers in the step that is not recorded yet: ended transfers, and the time so far of
    running ones."""
    moves: list[tuple[Channel, Transfer]] = []
    longest: dict[Labels, float] = {(path, op): 0.0 for path in current.paths for op in PATH_OPERATIONS}
    for path, path_state in current.paths.items():
        # In this order: a transfer that ends between the two reads is missed once, and never counted twice.
        ended = _ended(path_state.counters, current.phases)
        open_since = tuple(path_state.counters.open_transfers)
        for operation, since in open_since:
            longest[path, operation] = max(longest[path, operation], current.now - since)
        moves += [((path, operation), transfer) for operation, transfer in (*ended, *_open(open_since, current.phases))]
    found = totals_by_phase(sorted(moves, key=start_of), current.phases)
    totals = {(*channel, phase): total for (channel, phase), total in found.items()}
    metrics.set_pending("tidegate_path_bytes_total", {labels: total.nbytes for labels, total in totals.items()})
    metrics.set_pending("tidegate_path_busy_seconds_total", {labels: total.seconds for labels, total in totals.items()})
    metrics.set_series("tidegate_path_open_seconds", longest)


def _ended(counters: PathCounters, phases: Sequence[PhaseSpan]) -> list[tuple[str, Transfer]]:
    """Selects the transfers that began and ended inside these phases, each with its operation (read or write). Other
    transfers are counted when their step ends."""
    first, last = phases[0].start, phases[-1].end
    return [move for move in counters.moves.copy() if first <= move[1].start and move[1].end <= last]


def _open(open_since: Iterable[tuple[str, float]], phases: Sequence[PhaseSpan]) -> Iterator[tuple[str, Transfer]]:
    """Running transfers, cut to the time of these phases, with 0 bytes: bytes are counted when the transfer has ended.
    `open_since`: operation and start time of each."""
    first, now = phases[0].start, phases[-1].end
    for operation, since in open_since:
        if since < now:
            yield operation, Transfer(max(first, since), now, 0, 0.0)


def _gpu(metrics: MetricStore, gpu: GpuFigures) -> None:
    """Sets the metrics of the GPU from NVML's readings."""
    metrics.set_value("tidegate_gpu_utilization_ratio", gpu.utilization_ratio)
    speeds, nbytes, source = gpu.pcie_bytes_per_second, gpu.pcie_bytes, gpu.source
    metrics.set_series("tidegate_gpu_pcie_bytes_per_second", {(way, source): speed for way, speed in speeds.items()})
    metrics.set_series("tidegate_gpu_pcie_bytes_total", {(way, source): count for way, count in nbytes.items()})
    metrics.set_series("tidegate_gpu_pcie_discrepancy_ratio", {(way,): share for way, share in gpu.discrepancy.items()})
