"""Every metric, once: name, type, unit, labels with their closed sets, what it says, the screen that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tidegate.plan.ops import path_lanes
from tidegate.timeline import PHASES, STALL_CAUSES

MetricType = Literal["counter", "gauge", "histogram"]
Screen = Literal["now", "update", "links", "knobs", "prometheus"]

DIRECTIONS: Final = ("h2d", "d2h")
CONTENTS: Final = ("gradient", "weight", "state")
PROCESSORS: Final = ("cpu", "device")
PATH: Final = "<path>"
"""In a closed set of label values: each of the names of the run's storage paths. A run without any lacks the families
that have a label of that set alone."""
PATH_OPERATIONS: Final = ("read", "write")
RESIDENCES: Final = ("host", "device", PATH)
CAUSES: Final = (*STALL_CAUSES, *path_lanes(PATH))
KNOBS: Final = ("device_share", "static_ratio", "host_cache_bytes", "alternate_order")

SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One family. `labels` maps a label's name to its closed set of values."""

    name: str
    type: MetricType
    unit: str
    help: str
    labels: dict[str, tuple[str, ...]]
    screen: Screen
    """Where the live view shows it; `prometheus` for those that are made for rules only."""
    owner: Literal["agent", "daemon"] = "agent"

    @property
    def needs_paths(self) -> bool:
        """Only runs with storage paths have it."""
        return (PATH,) in self.labels.values()

    def values(self, label: str, paths: Sequence[str] = ()) -> tuple[str, ...]:
        """What `label` may be in a run with these storage paths."""
        found: dict[str, None] = {}
        for value in self.labels[label]:
            found |= dict.fromkeys([value.replace(PATH, path) for path in paths] if PATH in value else [value])
        return tuple(found)


_P = {"phase": PHASES}
_LINK = {"direction": DIRECTIONS, "phase": PHASES, "content": CONTENTS}
_PATH = {"path": (PATH,), "operation": PATH_OPERATIONS}


def _m(name: str, type: MetricType, unit: str, screen: Screen, help: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name=f"tidegate_{name}", type=type, unit=unit, help=help, labels=labels, screen=screen)


METRICS: Final[tuple[Metric, ...]] = (
    _m(
        "phase_seconds",
        "histogram",
        "seconds",
        "now",
        "Wall time of each phase, one observation a phase and step.",
        **_P,
    ),
    _m("exposed_seconds_total", "counter", "seconds", "now", "Time the training thread was blocked by Tidegate.", **_P),
    _m("step_timestamp_seconds", "gauge", "seconds", "now", "When the last step ended, since the epoch."),
    _m("steps_total", "counter", "steps", "now", "Optimizer steps finished."),
    _m("skipped_steps_total", "counter", "steps", "now", "Steps skipped because of non-finite gradients."),
    _m("tokens_total", "counter", "tokens", "now", "Tokens trained on, as told by optimizer.log()."),
    _m("loss", "gauge", "1", "now", "Last loss, as told by optimizer.log()."),
    _m("grad_norm", "gauge", "1", "now", "Norm of all gradients at the last step, before clipping."),
    _m("link_bytes_total", "counter", "bytes", "links", "Bytes copied over the link, counted at the call.", **_LINK),
    _m(
        "link_busy_seconds_total",
        "counter",
        "seconds",
        "links",
        "Time with a copy in progress.",
        direction=DIRECTIONS,
        phase=PHASES,
    ),
    _m(
        "path_bytes_total",
        "counter",
        "bytes",
        "links",
        "Bytes read from and written to a storage path, padding included, counted at the call.",
        **_PATH,
        **_P,
    ),
    _m(
        "path_busy_seconds_total",
        "counter",
        "seconds",
        "links",
        "Time with a read or write of a storage path in progress, waits for its lock excluded.",
        **_PATH,
        **_P,
    ),
    _m(
        "path_lock_wait_seconds_total",
        "counter",
        "seconds",
        "links",
        "Time that reads and writes waited for other processes of this node to leave a storage path.",
        **_PATH,
    ),
    _m(
        "path_errors_total",
        "counter",
        "attempts",
        "links",
        "Reads and writes of a storage path that failed, those that were repeated included.",
        **_PATH,
    ),
    _m(
        "path_ceiling_bytes_per_second",
        "gauge",
        "bytes/s",
        "links",
        "What a storage path could do alone when the run began.",
        **_PATH,
    ),
    _m("path_free_bytes", "gauge", "bytes", "links", "What more state may take on a storage path.", path=(PATH,)),
    _m(
        "path_written_bytes_per_day",
        "gauge",
        "bytes/day",
        "links",
        "Bytes that this rank writes to a storage path in a day at the pace of the last hour: what wears out an SSD.",
        path=(PATH,),
    ),
    _m(
        "stall_seconds_total",
        "counter",
        "seconds",
        "update",
        "Time the step could not proceed, by what it waited for.",
        phase=PHASES,
        cause=CAUSES,
    ),
    _m(
        "update_spill_seconds_total",
        "counter",
        "seconds",
        "update",
        "Time an update went on after step() had returned, while the next forward ran (overlap_forward).",
    ),
    _m(
        "device_memory_peak_bytes",
        "gauge",
        "bytes",
        "now",
        "Highest device memory in use in the last such phase.",
        phase=PHASES,
    ),
    _m(
        "host_memory_bytes",
        "gauge",
        "bytes",
        "now",
        "Host memory that the engine holds.",
        kind=("state", "mirror", "gradient", "slot"),
    ),
    _m("cpu_seconds_total", "counter", "seconds", "now", "CPU time of this process.", **_P),
    _m("update_params_total", "counter", "parameters", "update", "Parameters updated.", processor=PROCESSORS),
    _m(
        "subgroups",
        "gauge",
        "subgroups",
        "knobs",
        "Subgroups by where their state lives between steps.",
        residence=RESIDENCES,
    ),
    _m(
        "knob",
        "gauge",
        "1",
        "knobs",
        "Knobs as numbers: stride as device_share, order as alternate_order; desired auto is absent.",
        knob=KNOBS,
        state=("desired", "effective"),
    ),
    _m(
        "tier_share",
        "gauge",
        "1",
        "knobs",
        "Share of the subgroups in storage that a path gets (knob tier_split); desired auto is absent.",
        path=(PATH,),
        state=("desired", "effective"),
    ),
    _m("generation", "gauge", "1", "knobs", "The newest generation of knobs that this rank has applied."),
    _m(
        "predicted_phase_seconds",
        "gauge",
        "seconds",
        "knobs",
        "What the simulator expects of the phase.",
        phase=("update",),
    ),
    _m(
        "prediction_error_ratio",
        "gauge",
        "1",
        "knobs",
        "|predicted - measured| / measured of the last step.",
        phase=("update",),
    ),
    _m(
        "agent_overhead_seconds_total",
        "counter",
        "seconds",
        "prometheus",
        "CPU time that watching costs.",
        part=("recorder", "tuner", "exporter", "link"),
    ),
)

DAEMON_METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        name="tidegate_agents",
        type="gauge",
        unit="agents",
        owner="daemon",
        screen="now",
        help="Ranks by run and state.",
        labels={"state": ("live", "stale", "lost", "finished")},
    ),
    Metric(
        name="tidegate_desired_generation",
        type="gauge",
        unit="1",
        owner="daemon",
        screen="knobs",
        help="Newest committed generation of the run.",
        labels={},
    ),
    Metric(
        name="tidegate_requests_total",
        type="counter",
        unit="requests",
        owner="daemon",
        screen="prometheus",
        help="HTTP requests by route template, method and status class.",
        labels={},
    ),
    Metric(
        name="tidegate_request_seconds",
        type="histogram",
        unit="seconds",
        owner="daemon",
        screen="prometheus",
        help="Time to answer, by route template and method.",
        labels={},
    ),
)

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS + DAEMON_METRICS}
"""Daemon families also carry `run`, and the request families `route`, `method` and `status`: open sets."""
