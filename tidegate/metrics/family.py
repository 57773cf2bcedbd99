"""What the catalogue says of a family, and the closed sets that its labels take their values from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tidegate.plan.ops import path_lanes
from tidegate.timeline.timeline import STALL_CAUSES

MetricType = Literal["counter", "gauge", "histogram"]
Screen = Literal[
    "Header",
    "Phases",
    "Stalls by cause",
    "Division of work",
    "Storage paths",
    "Link",
    "Link, by phase",
    "Memory",
    "Loss",
    "Gradient norm",
    "Tokens",
    "Knobs",
]
"""Sections of the live view, by their titles; the header has none."""
Needs = Literal["", "paths", "nvml"]
Owner = Literal["agent", "daemon"]

DIRECTIONS: Final = ("h2d", "d2h")
CONTENTS: Final = ("gradient", "weight", "state")
PROCESSORS: Final = ("cpu", "device")
PATH: Final = "<path>"
"""In a closed set of label values: each of the names of the run's storage paths. A run without any lacks the families
that have a label of that set alone."""
PATH_OPERATIONS: Final = ("read", "write")
RESIDENCES: Final = ("host", "device", PATH)
CAUSES: Final = (*STALL_CAUSES, *path_lanes(PATH))
REFUSALS: Final = ("deadline", "evicted", "too-large", "invalid", "full", "descriptors")
KNOBS: Final = ("device_share", "static_ratio", "host_cache_bytes", "alternate_order")
KNOB_STATES: Final = ("desired", "effective")
HOST_MEMORY_KINDS: Final = ("state", "mirror", "gradient", "slot")
PCIE_SOURCES: Final = ("fields", "gpm", "throughput")
"""Where NVML's figures of PCIe come from: byte counters, performance monitoring (Hopper and later), or samples of
20 ms. One of them at a time."""
PARTS: Final = ("recorder", "tuner", "exporter", "link", "sampler")

SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OPERATION_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
"""Of one read or write of a subgroup's state: a few MB in a millisecond, to some GB on a disk in trouble."""

MAX_SERIES: Final = 600
"""Series of one rank with four storage paths, at most."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One family. `labels` maps a label's name to its closed set of values."""

    name: str
    type: MetricType
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    screen: Screen | None = None
    """The section of the live view that shows it."""
    unseen: str = ""
    """Why no section does."""
    needs: Needs = ""
    """What a run must have for the family to be there: storage paths, or a GPU that NVML knows. Else it is absent."""
    owner: Owner = "agent"
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    def values(self, label: str, paths: Sequence[str] = ()) -> tuple[str, ...]:
        """What `label` may be in a run with these storage paths."""
        found: dict[str, None] = {}
        for value in self.labels[label]:
            found |= dict.fromkeys([value.replace(PATH, path) for path in paths] if PATH in value else [value])
        return tuple(found)

    def max_series(self, paths: Sequence[str] = ()) -> int:
        """The most series that it can have in a run with these storage paths: as if every combination came up."""
        if self.needs == "paths" and not paths:
            return 0
        count = len(self.buckets) + 3 if self.type == "histogram" else 1  # +Inf, sum and count
        for label in self.labels:
            # A run has one source of PCIe figures.
            count *= 1 if self.labels[label] == PCIE_SOURCES else len(self.values(label, paths))
        return count
