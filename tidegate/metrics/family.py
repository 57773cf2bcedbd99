"""The definition of one metric family, and the closed sets of label values."""

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
"""Sections of the live view, by title; the section `Header` has no title on the screen."""
Needs = Literal["", "paths", "nvml"]
Owner = Literal["agent", "daemon"]

DIRECTIONS: Final = ("h2d", "d2h")
CONTENTS: Final = ("gradient", "weight", "state")
PROCESSORS: Final = ("cpu", "device")
PATH: Final = "<path>"
"""Placeholder in a closed set of label values: it stands for the names of the run's storage paths. If it is a label's
only value, runs without storage paths do not export the family."""
PATH_OPERATIONS: Final = ("read", "write")
RESIDENCES: Final = ("host", "device", PATH)
CAUSES: Final = (*STALL_CAUSES, *path_lanes(PATH))
AGENT_REFUSALS: Final = ("no-token", "wrong-token", "expired-token", "revoked-token", "wrong-scope", "wrong-run")
LINK_REFUSALS: Final = ("rank", "token")
REFUSALS: Final = ("deadline", "evicted", "too-large", "invalid", "full", "descriptors")
KNOBS: Final = ("device_share", "static_ratio", "host_cache_bytes", "alternate_order")
KNOB_STATES: Final = ("desired", "effective")
HOST_MEMORY_KINDS: Final = ("state", "mirror", "gradient", "slot")
PCIE_SOURCES: Final = ("fields", "gpm", "throughput")
"""Sources of NVML's PCIe figures: byte counters (`fields`), performance monitoring (`gpm`, Hopper and later), or
samples of 20 ms (`throughput`). One source is in use at a time."""
PARTS: Final = ("recorder", "tuner", "exporter", "link", "sampler")
"""The parts of the agent whose CPU time is measured."""

SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OPERATION_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
"""Buckets, in seconds, for one read or write of a subgroup's state: from a few MB in a millisecond to some GB on a slow
or failing disk."""

MAX_SERIES: Final = 600
"""Maximum number of time series that one rank with four storage paths may export."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The definition of one metric family. `labels` maps the name of each label to its closed set of values."""

    name: str
    type: MetricType
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    screen: Screen | None = None
    """The section of the live view that shows the family; None if no section does."""
    unseen: str = ""
    """The reason why no section of the live view shows the family; empty if `screen` is set."""
    needs: Needs = ""
    """Precondition of the family: storage paths, or a GPU that NVML knows. The family is absent in other runs."""
    owner: Owner = "agent"
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""

    def values(self, label: str, paths: Sequence[str] = ()) -> tuple[str, ...]:
        """The allowed values of `label` in a run with these storage paths."""
        allowed: dict[str, None] = {}
        for value in self.labels[label]:
            allowed |= dict.fromkeys([value.replace(PATH, path) for path in paths] if PATH in value else [value])
        return tuple(allowed)

    def max_series(self, paths: Sequence[str] = ()) -> int:
        """Upper bound of the time series of the family in a run with these storage paths: all combinations of label
        values."""
        if self.needs == "paths" and not paths:
            return 0
        count = len(self.buckets) + 3 if self.type == "histogram" else 1  # +Inf, sum and count
        for label in self.labels:
            # A run has only one source of PCIe figures at a time.
            count *= 1 if self.labels[label] == PCIE_SOURCES else len(self.values(label, paths))
        return count
