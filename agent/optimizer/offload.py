"""`tidegate.Offload`: where and how state is offloaded, as the user says it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.gradients.accumulation import Accumulation
from tidegate.agent.gradients.gradients import Mode
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import AUTO, PATH_KNOBS, Knobs, check_path_name, specs_for
from tidegate.plan import Policy


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where and how state is offloaded.

    stride: every stride-th subgroup that is not resident is updated on the device; "off", or "auto": 2 at first, then
        what measured rates call for, once attached.
    static_ratio: share of the subgroups whose state stays on the device.
    subgroup_numel: parameters per subgroup.
    num_slots: staging slots on the device; two or more let copies in, updates and copies out overlap.
    cpu_threads: threads of the CPU lane; 0 for the cores that are left by the training threads of the host's ranks.
    device: "auto" takes the emulated device where there is no GPU; "emulated" always.
    device_memory_bytes: capacity of the emulated device; 0 for four times what the weights take, plus the state.
    emulated: rates of the emulated lanes.
    headroom_bytes: device memory that state must leave free.
    gradients: "keep" leaves `.grad` as it is, what is done to it counts; "release" takes each gradient as it arrives
        and frees it as soon as it was copied or used: clip with `max_grad_norm`, and put all but the last backward of a
        step into `with optimizer.accumulate():`.
    accumulation: with "release", where gradients of a step's backward passes before the last one wait: "device" leaves
        them in `.grad`; "host" adds each to a sum in host memory, rounded as torch rounds sums in `.grad`; "host_fp32"
        in fp32, rounded once. Then `.grad` is None between two backward passes, and the device has no gradients; only
        `optimizer.zero_grad()` drops the sums, not `model.zero_grad()`.
    gradient_memory_bytes: with "release", what gradients may take on the device. Those that wait for the update and
        find no room are spilled to the host and come back with their state; a backward waits for copies while its next
        gradient would have no room. 0 for what weights, state and headroom leave: activations are in none of these, so
        set it, or `headroom_bytes`, where they take much of the device.
    policy: "interleaved", or a baseline: "sequential", "twinflow".
    paths: storage for state that neither device nor host memory keeps: directories or
        "s3://bucket/prefix", by name; or `PathSettings`, `ObjectSettings`.
    tier_split: what share of it each path gets, "nvme:2,pfs:1"; "auto": what measured speeds call for; "eq1": in
        proportion to the slower of their read and write bandwidths (MLP-Offload, Eq. 1).
    host_cache: bytes of host memory ("8GiB") that hold some of it between steps; "auto": 90 % of what is free, in equal
        parts for the ranks of a node.
    order: "pinned" keeps the same subgroups in the host cache; "alternate" runs every other update backwards and keeps
        those that the next one begins with (MLP-Offload); "auto": pinned.
    host_slots: staging slots in host memory for each path; three let a fetch, an update and a flush overlap.
    """

    stride: float | str = AUTO
    static_ratio: float = 0.0
    subgroup_numel: int = 100_000_000
    num_slots: int = 2
    cpu_threads: int = 0
    device: str = "auto"
    device_memory_bytes: int = 0
    emulated: EmulatedRates = field(default_factory=EmulatedRates)
    headroom_bytes: int = 0
    gradients: Mode = "keep"
    accumulation: Accumulation = "device"
    gradient_memory_bytes: int = 0
    policy: Policy = "interleaved"
    watchdog_seconds: float = 120.0
    paths: Mapping[str, str | os.PathLike[str] | PathSettings | ObjectSettings] = field(default_factory=dict)
    tier_split: str = AUTO
    host_cache: int | str = AUTO
    order: str = AUTO
    host_slots: int = 3

    def __post_init__(self) -> None:
        _check_paths(self.paths)
        for name in self.paths:
            check_path_name(name)
        self.path_settings()
        self.knobs()
        for name in ("subgroup_numel", "num_slots", "host_slots", "cpu_threads", "headroom_bytes",
                     "gradient_memory_bytes"):  # fmt: skip
            minimum = 1 if name in ("subgroup_numel", "num_slots", "host_slots") else 0
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: at least {minimum}.")
        if self.device not in ("auto", "emulated"):
            raise ConfigError(f"device={self.device!r} is unknown: 'auto' or 'emulated'.")
        if self.gradients not in get_args(Mode):
            raise ConfigError(f"gradients={self.gradients!r} is unknown: 'keep' or 'release'.")
        if self.accumulation not in get_args(Accumulation):
            raise ConfigError(f"accumulation={self.accumulation!r} is unknown: 'device', 'host' or 'host_fp32'.")
        if self.accumulation != "device" and self.gradients == "keep":
            raise ConfigError(
                f"accumulation={self.accumulation!r} needs gradients='release': with 'keep', `.grad` has the sum."
            )

    def knobs(self) -> Knobs:
        """What the run begins with. KnobError for what is out of range or needs paths that are not there."""
        wanted: dict[str, Any] = {"stride": self.stride, "static_ratio": self.static_ratio}
        wanted |= {name: getattr(self, name) for name in PATH_KNOBS if getattr(self, name) != AUTO}
        return Knobs().changed(wanted, specs_for(tuple(self.paths)))

    def path_settings(self) -> dict[str, PathSettings | ObjectSettings]:
        """By name, in their order. ConfigError for the address of something that is not an object store we know."""
        return {name: _settings(path) for name, path in self.paths.items()}


def as_offload(given: Any) -> Offload:
    """What the optimizer was given as `offload`; None is the defaults. ConfigError for what is no `Offload`."""
    if isinstance(given, Offload):
        return given
    if given is None:
        return Offload()
    remedy = "write offload=tidegate.Offload(...)"
    if isinstance(given, Mapping):
        remedy = f"write offload=tidegate.Offload({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    elif isinstance(given, str):
        remedy = f"name a directory, as in offload=tidegate.Offload(paths={{{given!r}: '/{given}/tide'}})"
    elif given is True:
        remedy = "leave it out for the defaults, or write offload=tidegate.Offload()"
    elif given is False:
        remedy = "leave it out for the defaults; without offloading there is torch.optim.AdamW"
    raise ConfigError(f"offload={given!r} is a {type(given).__name__}, and no tidegate.Offload: {remedy}.")


def _check_paths(paths: Any) -> None:
    """ConfigError for what is no mapping of names to places."""
    if isinstance(paths, str | os.PathLike):
        place = os.fspath(paths)
        last = place.rstrip("/").rpartition("/")[2]
        name = last if re.fullmatch(r"[a-z0-9_-]{1,32}", last) and last not in ("host", "device") else "path"
        raise ConfigError(f"paths={place!r} has no name: write paths={{{name!r}: {place!r}}}.")
    if not isinstance(paths, Mapping):
        raise ConfigError(
            f"paths={paths!r} is a {type(paths).__name__}: give names and directories, {{'nvme': '/nvme/tide'}}."
        )
    for name, place in paths.items():
        if not isinstance(place, str | os.PathLike | PathSettings | ObjectSettings):
            raise ConfigError(
                f"paths={{{name!r}: {place!r}}} is no place: give a directory, an address of an object store, "
                "PathSettings or ObjectSettings."
            )


def _settings(path: str | os.PathLike[str] | PathSettings | ObjectSettings) -> PathSettings | ObjectSettings:
    if isinstance(path, PathSettings | ObjectSettings):
        return path
    if isinstance(path, str) and "://" in path:
        return ObjectSettings(url=path)
    return PathSettings(directory=path)
