"""The catalogue of all Prometheus metrics: name, type, unit, labels with allowed values, help text, and the section of
the live view that shows each metric.

`docs/metrics.md` is generated from it: `python -m tidegate.metrics.page > docs/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidegate.metrics.family import (
    AGENT_REFUSALS,
    CAUSES,
    CONTENTS,
    DIRECTIONS,
    HOST_MEMORY_KINDS,
    KNOB_STATES,
    KNOBS,
    LINK_REFUSALS,
    OPERATION_BUCKETS,
    PARTS,
    PATH,
    PATH_OPERATIONS,
    PCIE_SOURCES,
    PROCESSORS,
    REFUSALS,
    RESIDENCES,
    SECONDS_BUCKETS,
    Metric,
)
from tidegate.timeline.timeline import PHASES

Labels = Mapping[str, tuple[str, ...]]

_PHASE = {"phase": PHASES}
_LINK: Labels = {"direction": DIRECTIONS, "phase": PHASES, "content": CONTENTS}
_DIRECTION = {"direction": DIRECTIONS}
_PATH = {"path": (PATH,)}
_LANE: Labels = {"path": (PATH,), "operation": PATH_OPERATIONS}
_PCIE: Labels = {"direction": DIRECTIONS, "source": PCIE_SOURCES}
_PREDICTED = {"phase": ("forward", "backward", "update")}
_RULES = "For alert rules."
_CROSS_CHECK = "A second measurement of the counted bytes, for Prometheus."


def _metric(kind: Any, name: str, unit: str, labels: Labels, help: str, **more: Any) -> Metric:
    return Metric(name=f"tidegate_{name}", type=kind, unit=unit, labels=labels, help=help, **more)


def _counter(name: str, unit: str, labels: Labels, help: str, **more: Any) -> Metric:
    return _metric("counter", f"{name}_total", unit, labels, help, **more)


def _gauge(name: str, unit: str, labels: Labels, help: str, **more: Any) -> Metric:
    return _metric("gauge", name, unit, labels, help, **more)


def _histogram(name: str, labels: Labels, help: str, **more: Any) -> Metric:
    return _metric("histogram", name, "seconds", labels, help, **more)


_STEPS: Final = (
    _histogram(
        "phase_seconds", _PHASE, "Wall time of each phase, one observation a phase and step.",
        screen="Phases", buckets=SECONDS_BUCKETS,
    ),
    _gauge(
        "phase_open_seconds", "seconds", _PHASE, "How long the present phase has lasted; 0 for the others.",
        unseen="For alerts on a phase that does not end; the header names the present phase.",
    ),
    _counter(
        "exposed_seconds", "seconds", _PHASE, "Time the training thread was blocked by Tidegate.", screen="Phases"
    ),
    _gauge(
        "step", "1", {}, "Number of the last step: a run that resumes from a checkpoint counts on.", screen="Header"
    ),
    _gauge("step_timestamp_seconds", "seconds", {}, "When the last step ended, since the epoch.", screen="Header"),
    _gauge(
        "step_open_seconds", "seconds", {},
        "How long forward, backward and update of the present step have lasted so far.",
        unseen="For alerts on a step that does not end; the header names the present phase.",
    ),
    _counter(
        "steps", "steps", {}, "Optimizer steps that this process has finished.",
        unseen="For rates; the header has the number of the last step.",
    ),
    _counter("skipped_steps", "steps", {}, "Steps skipped because of non-finite gradients.", screen="Header"),
    _counter("tokens", "tokens", {}, "Tokens trained on, as told by optimizer.log().", screen="Tokens"),
    _gauge("loss", "1", {}, "Last loss, as told by optimizer.log().", screen="Loss"),
    _gauge("grad_norm", "1", {}, "Norm of all gradients at the last step, before clipping.", screen="Gradient norm"),
    _counter(
        "stall_seconds", "seconds", {"phase": PHASES, "cause": CAUSES},
        "Time the step could not proceed, by what it waited for.", screen="Stalls by cause",
    ),
    _counter(
        "update_spill_seconds", "seconds", {},
        "Time an update went on after step() had returned, while the next forward ran (overlap_forward), "
        "without deferred flushes.",
        unseen="The Gantt of the last update shows it as what lies beyond the update.",
    ),
)  # fmt: skip

_LINKS: Final = (
    _counter("link_bytes", "bytes", _LINK, "Bytes copied over the link, counted at the call.", screen="Link"),
    _counter(
        "link_busy_seconds", "seconds", {"direction": DIRECTIONS, "phase": PHASES}, "Time with a copy in progress.",
        screen="Link, by phase",
    ),
    _gauge(
        "link_ceiling_bytes_per_second", "bytes/s", _DIRECTION,
        "The highest mean speed of copies in any step of this run that copied at least 1 MiB.",
        unseen="For alerts on a saturated link; the live view compares with the fastest of the steps that it shows.",
    ),
)  # fmt: skip

_PATHS: Final = (
    _counter(
        "path_bytes", "bytes", {**_LANE, **_PHASE},
        "Bytes read from and written to a storage path, padding included, counted at the call.",
        screen="Storage paths", needs="paths",
    ),
    _counter(
        "path_busy_seconds", "seconds", {**_LANE, **_PHASE},
        "Time with a read or write of a storage path in progress, waits for its lock excluded; also of those that "
        "have not ended yet.",
        screen="Storage paths", needs="paths",
    ),
    _histogram(
        "path_operation_seconds", _LANE, "Duration of each read or write of a subgroup's state, repeats included.",
        unseen="For quantiles over time; the Gantt shows each operation of the last update.", needs="paths",
        buckets=OPERATION_BUCKETS,
    ),
    _gauge(
        "path_open_seconds", "seconds", _LANE,
        "How long the read or write in progress has lasted; 0 when none is.",
        unseen="For alerts on one that hangs.", needs="paths",
    ),
    _counter(
        "path_lock_wait_seconds", "seconds", _LANE,
        "Time that reads and writes waited for other processes of this node to leave a storage path.",
        screen="Storage paths", needs="paths",
    ),
    _gauge(
        "path_lock_slots", "1", _PATH,
        "How many processes of this node may use a storage path at once; absent without exclusive access.",
        unseen=_RULES, needs="paths",
    ),
    _counter(
        "path_lock_timeouts", "waits", _PATH,
        "Waits for a storage path that took too long: it was used without exclusive access.",
        unseen=_RULES, needs="paths",
    ),
    _counter(
        "path_errors", "attempts", _LANE,
        "Reads and writes of a storage path that failed, those that were repeated included. In a directory an attempt "
        "moves the state of a subgroup; in an object store it is the request for one block.",
        screen="Storage paths", needs="paths",
    ),
    _counter(
        "path_retries", "attempts", _LANE,
        "Reads and writes of a storage path that were repeated. Attempts are counted as in tidegate_path_errors_total.",
        unseen="A part of the errors that the live view shows.", needs="paths",
    ),
    _counter(
        "path_taken_over_bytes", "bytes", _PATH,
        "Bytes written to a storage path because the one that was planned had failed or was full.",
        unseen=_RULES, needs="paths",
    ),
    _gauge(
        "path_retired", "1", _PATH, "1 for a storage path that failed for good and takes no more state, else 0.",
        unseen=_RULES, needs="paths",
    ),
    _gauge(
        "path_ceiling_bytes_per_second", "bytes/s", _LANE, "Speed of a path alone, measured when the run began.",
        screen="Storage paths", needs="paths",
    ),
    _gauge(
        "path_free_bytes", "bytes", _PATH,
        "Free space for state on a storage path; absent for an object store without capacity_bytes.",
        screen="Storage paths", needs="paths",
    ),
    _gauge(
        "path_capacity_bytes", "bytes", _PATH,
        "Size of a storage path: of its file system, or what the settings allow if that is less; absent for an object "
        "store without capacity_bytes.",
        unseen="Free space as a share, for alerts.", needs="paths",
    ),
    _gauge(
        "path_written_bytes_per_day", "bytes/day", _PATH,
        "Bytes that this rank writes to a storage path in a day at the pace of the last hour: what wears out an SSD; "
        "absent for an object store.",
        screen="Storage paths", needs="paths",
    ),
    _gauge(
        "path_wear_limit_bytes_per_day", "bytes/day", _PATH,
        "What the settings allow to be written to a storage path in a day; absent without a limit.",
        unseen="The bound of the alert on SSD wear.", needs="paths",
    ),
)  # fmt: skip

_MACHINE: Final = (
    _gauge(
        "device_memory_peak_bytes", "bytes", _PHASE, "Highest device memory in use in the last such phase.",
        screen="Memory",
    ),
    _gauge(
        "device_memory_capacity_bytes", "bytes", {}, "Device memory that this process may use.",
        screen="Memory",
    ),
    _gauge(
        "host_memory_bytes", "bytes", {"kind": HOST_MEMORY_KINDS}, "Host memory that the engine holds.", screen="Memory"
    ),
    _counter("cpu_seconds", "seconds", _PHASE, "CPU time of this process.", screen="Phases"),
    _counter(
        "process_io_bytes", "bytes", {"operation": PATH_OPERATIONS},
        "Bytes that this process had storage read and write, as the kernel counts them: not what the page cache gave.",
        unseen=_CROSS_CHECK,
    ),
    _gauge(
        "gpu_utilization_ratio", "1", {}, "Share of NVML's last sample period in which the GPU ran a kernel.",
        unseen="NVML knows no phases; for Prometheus.", needs="nvml",
    ),
    _counter(
        "gpu_pcie_bytes", "bytes", _PCIE,
        "Bytes over PCIe of the GPU, whoever moved them, as NVML says; absent where it only samples. Counters of 32 "
        "bits (`fields` on some GPUs) miss intervals in which the host was too busy to read them in time.",
        unseen=_CROSS_CHECK, needs="nvml",
    ),
    _gauge(
        "gpu_pcie_bytes_per_second", "bytes/s", _PCIE, "Speed over PCIe in NVML's last sample.",
        unseen=_CROSS_CHECK, needs="nvml",
    ),
    _gauge(
        "gpu_pcie_discrepancy_ratio", "1", _DIRECTION,
        "(PCIe bytes as NVML says - bytes that Tidegate counted) / the former, over the last minutes: what else used "
        "the link.",
        unseen=_CROSS_CHECK, needs="nvml",
    ),
)  # fmt: skip

_CONTROL: Final = (
    _counter(
        "update_params", "parameters", {"processor": PROCESSORS}, "Parameters updated.", screen="Division of work"
    ),
    _gauge(
        "subgroups", "subgroups", {"residence": RESIDENCES}, "Subgroups by where their state lives between steps.",
        screen="Division of work",
    ),
    _gauge(
        "knob", "1", {"knob": KNOBS, "state": KNOB_STATES},
        "Knobs as numbers: stride as device_share, order as alternate_order; desired auto is absent.", screen="Knobs",
    ),
    _gauge(
        "tier_share", "1", {**_PATH, "state": KNOB_STATES},
        "Share of the subgroups in storage that a path gets (knob tier_split); desired auto is absent.",
        screen="Knobs", needs="paths",
    ),
    _gauge("generation", "1", {}, "The newest generation of knobs that this rank has applied.", screen="Header"),
    _gauge(
        "predicted_phase_seconds", "seconds", _PREDICTED,
        "What is expected of the phase: the update by the simulator, the others as the median of the last 20 steps.",
        screen="Header",
    ),
    _gauge(
        "prediction_error_ratio", "1", _PREDICTED, "|predicted - measured| / measured of the last step.",
        screen="Header",
    ),
    _counter(
        "agent_overhead_seconds", "seconds", {"part": PARTS}, "CPU time that telemetry takes.",
        unseen="It matters over hours; `bench/overhead.py` measures it.",
    ),
    _counter(
        "agent_thread_failures", "1", {}, "Failures of threads that speak with the daemon; each thread begins again.",
        unseen="The log has what failed.",
    ),
    _gauge(
        "agent_refused", "1", {"reason": LINK_REFUSALS},
        "1 while the daemon refuses this process, for its token or because another agent holds the rank; else 0.",
        unseen="The daemon cannot show what it refuses. The log has the reason.",
    ),
)  # fmt: skip

METRICS: Final[tuple[Metric, ...]] = (*_STEPS, *_LINKS, *_PATHS, *_MACHINE, *_CONTROL)
"""The metric families that a rank (a training process) exports."""

DAEMON_METRICS: Final[tuple[Metric, ...]] = (
    _gauge(
        "agents", "agents", {"state": ("live", "stale", "lost", "failed", "finished")}, "Ranks by run and state.",
        screen="Header", owner="daemon",
    ),
    _gauge(
        "run_broken", "1", {"state": ("failed", "lost")},
        "1 for a run of which a rank failed by an exception (failed; label error has its type), or of which no rank "
        "was left and one at least was lost (lost): for a day, or until a rank that was started since has finished a "
        "step; else 0.",
        unseen="For alert rules; the header says how a run failed.", owner="daemon",
    ),
    _gauge(
        "desired_generation", "1", {}, "Newest committed generation of the run.", screen="Knobs", owner="daemon"
    ),
    _gauge(
        "refused_agents", "1", {"reason": AGENT_REFUSALS},
        "Addresses from which agents were refused in the last 3 minutes.", screen="Header", owner="daemon",
    ),
    _counter(
        "requests", "requests", {}, "HTTP requests by route template, method and status class.",
        unseen="The daemon's own health.", owner="daemon",
    ),
    _histogram(
        "request_seconds", {}, "Time to answer, by route template and method.",
        unseen="The daemon's own health.", owner="daemon", buckets=SECONDS_BUCKETS,
    ),
    _counter(
        "refused_connections", "connections", {"reason": REFUSALS},
        "Connections that the daemon closed or kept waiting: no request in time (deadline), newer ones in their place "
        "(evicted), headers above the bound (too-large), no HTTP (invalid), no place (full), no descriptor "
        "(descriptors).",
        unseen="The daemon's own health.", owner="daemon",
    ),
)  # fmt: skip
"""The metric families that the daemon exports. They also have the label `run`, `tidegate_run_broken` has `error`,
and the families of requests have `route`, `method` and `status`; the values of these labels are not a closed set."""

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS + DAEMON_METRICS}
