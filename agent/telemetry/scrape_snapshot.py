"""What is so at this moment, asked for when Prometheus scrapes: an update of minutes, or a read that hangs, shows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.telemetry.bytes_by_phase import moves_by_phase
from tidegate.agent.telemetry.gpu import GpuFigures
from tidegate.agent.telemetry.metric_store import Labels, Meter
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.agent.tiers.transfers import PathCounters, Transfer
from tidegate.knobs.knobs import AUTO, EQ1, KnobValue, device_share, weights_of
from tidegate.metrics.family import PATH_OPERATIONS
from tidegate.timeline.timeline import PHASES, PhaseSpan


@dataclass(frozen=True, kw_only=True)
class PathNow:
    """One storage path, apart from what belongs to a step."""

    counters: PathCounters
    lock_timeouts: int
    retired: bool
    capacity_bytes: int
    """0 when its directory is gone."""
    wear_bytes_per_day: int
    """The limit; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Present:
    """Everything about a rank that changes between the ends of two steps. Times are on the monotonic clock."""

    now: float
    phases: tuple[PhaseSpan, ...]
    """Of the steps that are not recorded yet, one after the other; the last one goes on."""
    paths: Mapping[str, PathNow]
    desired: Mapping[str, KnobValue]
    effective: Mapping[str, KnobValue]
    generation: int
    overhead_seconds: Mapping[str, float]
    device_capacity_bytes: int
    process_io_bytes: Mapping[str, int]
    """By operation; empty where the kernel does not say."""
    gpu: GpuFigures = field(default_factory=GpuFigures)
    thread_failures: int = 0
    """Of threads that speak with the daemon."""


def look(
    optimizer: AdamW, capacities: Mapping[str, int], generation: int, overhead: Mapping[str, float], gpu: GpuFigures,
    thread_failures: int = 0,
) -> Present:  # fmt: skip
    """From any thread. `capacities`: of the paths, that do not change."""
    phases = optimizer.phases_so_far()
    return Present(
        now=time.monotonic(),
        phases=phases,
        paths=_paths_now(optimizer.engine.store, capacities),
        desired=optimizer.knobs.as_dict(),
        effective=optimizer.effective_knobs(),
        generation=generation,
        overhead_seconds=overhead,
        device_capacity_bytes=optimizer.device.capacity_bytes,
        process_io_bytes=_process_io(),
        gpu=gpu,
        thread_failures=thread_failures,
    )


def _process_io() -> dict[str, int]:
    try:
        found = psutil.Process().io_counters()
    except (psutil.Error, OSError):
        return {}
    return {"read": found.read_bytes, "write": found.write_bytes}


def _paths_now(store: TierStore | None, capacities: Mapping[str, int]) -> dict[str, PathNow]:
    if store is None:
        return {}
    return {
        name: PathNow(
            counters=path.counters,
            lock_timeouts=path.lock_timeouts,
            retired=name in store.retired,
            capacity_bytes=capacities[name],
            wear_bytes_per_day=path.settings.wear_bytes_per_day if isinstance(path, StoragePath) else 0,
        )
        for name, path in store.paths.items()
    }


def show(meter: Meter, present: Present) -> None:
    """Brings the families of the moment up to date: one call of the meter for each."""
    open_phase = present.phases[-1]
    meter.put(
        "tidegate_phase_open_seconds",
        {(phase,): present.now - open_phase.start if phase == open_phase.phase else 0.0 for phase in PHASES},
    )
    meter.put_one("tidegate_device_memory_capacity_bytes", present.device_capacity_bytes)
    meter.put("tidegate_agent_overhead_seconds_total", {(part,): s for part, s in present.overhead_seconds.items()})
    meter.put_one("tidegate_agent_thread_failures_total", present.thread_failures)
    meter.put("tidegate_process_io_bytes_total", {(op,): nbytes for op, nbytes in present.process_io_bytes.items()})
    _control(meter, present)
    if present.paths:
        _paths(meter, present)
        _under_way(meter, present)
    _gpu(meter, present.gpu)


def _control(meter: Meter, present: Present) -> None:
    states = (("desired", present.desired), ("effective", present.effective))
    meter.put(
        "tidegate_knob",
        {(knob, state): number for state, knobs in states for knob, number in _as_numbers(knobs).items()},
    )
    meter.put_one("tidegate_generation", present.generation)
    paths = tuple(present.paths)
    if paths:
        meter.put(
            "tidegate_tier_share",
            {
                (path, state): share
                for state, knobs in states
                for path, share in _shares(knobs.get("tier_split", AUTO), paths).items()
            },
        )


def _as_numbers(knobs: Mapping[str, KnobValue]) -> dict[str, float]:
    numbers = {"static_ratio": float(knobs["static_ratio"])}
    if knobs["stride"] != AUTO:
        numbers["device_share"] = device_share(knobs["stride"])  # type: ignore[arg-type]
    if (cache := knobs.get("host_cache", AUTO)) != AUTO:
        numbers["host_cache_bytes"] = float(cache)
    if (order := knobs.get("order", AUTO)) != AUTO:
        numbers["alternate_order"] = float(order == "alternate")
    return numbers


def _shares(tier_split: KnobValue, paths: Sequence[str]) -> dict[str, float]:
    """The share of each path; none while it is `auto`, or nothing is in storage."""
    weights = {} if tier_split in (AUTO, EQ1) else weights_of(str(tier_split))
    total = sum(weights.values())
    return {path: weights.get(path, 0.0) / total for path in paths} if total else {}


def _paths(meter: Meter, present: Present) -> None:
    paths = present.paths
    for counter in ("lock_wait_seconds", "errors", "retries"):
        rows: dict[Labels, float] = {
            (path, op): value for path, p in paths.items() for op, value in getattr(p.counters, counter).items()
        }
        meter.put(f"tidegate_path_{counter}_total", rows)
    meter.put("tidegate_path_lock_timeouts_total", {(path,): p.lock_timeouts for path, p in paths.items()})
    meter.put(
        "tidegate_path_taken_over_bytes_total", {(path,): p.counters.taken_over_bytes for path, p in paths.items()}
    )
    meter.put("tidegate_path_retired", {(path,): float(p.retired) for path, p in paths.items()})
    meter.put("tidegate_path_capacity_bytes", {(n,): p.capacity_bytes for n, p in paths.items() if p.capacity_bytes})
    limits: dict[Labels, float] = {(n,): p.wear_bytes_per_day for n, p in paths.items() if p.wear_bytes_per_day}
    meter.put("tidegate_path_wear_limit_bytes_per_day", limits)


def _under_way(meter: Meter, present: Present) -> None:
    """The part of a step that is not recorded yet: transfers that have ended, and those that go on as far as they
    got."""
    moved: defaultdict[Labels, float] = defaultdict(float)
    busy: defaultdict[Labels, float] = defaultdict(float)
    longest: dict[Labels, float] = {(path, op): 0.0 for path in present.paths for op in PATH_OPERATIONS}
    for path, state in present.paths.items():
        # In this order: a transfer that ends meanwhile is missed once, and not counted twice.
        ended = _ended(state.counters, present.phases)
        open_since = tuple(state.counters.under_way.values())
        for operation, since in open_since:
            longest[path, operation] = max(longest[path, operation], present.now - since)
        for operation, phase, nbytes, seconds in moves_by_phase(
            [*ended, *_open(open_since, present.phases)], present.phases
        ):
            moved[path, operation, phase] += nbytes
            busy[path, operation, phase] += seconds
    meter.ahead("tidegate_path_bytes_total", moved)
    meter.ahead("tidegate_path_busy_seconds_total", busy)
    meter.put("tidegate_path_open_seconds", longest)


def _ended(counters: PathCounters, phases: Sequence[PhaseSpan]) -> list[tuple[str, Transfer]]:
    """Those that lie in these phases. The others wait for their step's end."""
    first, last = phases[0].start, phases[-1].end
    return [move for move in counters.moves.copy() if first <= move[1].start and move[1].end <= last]


def _open(open_since: Iterable[tuple[str, float]], phases: Sequence[PhaseSpan]) -> Iterator[tuple[str, Transfer]]:
    """As far as they lie in these phases. Their bytes count when they have ended."""
    first, now = phases[0].start, phases[-1].end
    for operation, since in open_since:
        if since < now:
            yield operation, Transfer(max(first, since), now, 0, 0.0)


def _gpu(meter: Meter, gpu: GpuFigures) -> None:
    meter.put_one("tidegate_gpu_utilization_ratio", gpu.utilization_ratio)
    speeds, nbytes, source = gpu.pcie_bytes_per_second, gpu.pcie_bytes, gpu.source
    meter.put("tidegate_gpu_pcie_bytes_per_second", {(way, source): speed for way, speed in speeds.items()})
    meter.put("tidegate_gpu_pcie_bytes_total", {(way, source): count for way, count in nbytes.items()})
    meter.put("tidegate_gpu_pcie_discrepancy_ratio", {(way,): share for way, share in gpu.discrepancy.items()})
