"""`tidegate.Offload`: the user's settings of offloading."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.gradients.accumulation import Accumulation
from tidegate.agent.gradients.gradients import Mode
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import AUTO, PATH_KNOBS, Knobs, Order, Stride, check_path_name, specs_for
from tidegate.knobs.setting_checks import check_kind, check_number, check_text, check_whole, check_word
from tidegate.plan import Policy

DeviceChoice = Literal["auto", "emulated"]
"""Values of `Offload.device`."""

_LEAST: Final = {
    "subgroup_numel": 1,
    "num_slots": 1,
    "host_slots": 1,
    "cpu_threads": 0,
    "device_memory_bytes": 0,
    "headroom_bytes": 0,
    "gradient_memory_bytes": 0,
}
"""Minimum of each setting that must be an integer."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Settings of offloading: where state is stored, and how updates run. Fixed when the optimizer is built; attached
    runs may change the knobs (stride, static_ratio, tier_split, host_cache, order) later.

    stride: every stride-th subgroup that is not resident is updated on the device (Deep Optimizer States, Algorithm 1),
        1 to 1000000; "off", or "auto": 2 at first and, once attached, the best stride for the measured rates
        (subgroups; default "auto").
    static_ratio: share of the subgroups whose state stays on the device, 0 to 1; the set R of Deep Optimizer States,
        Algorithm 1 (share of subgroups; default 0.0).
    subgroup_numel: size of a subgroup, at least 1 (parameters; default 100_000_000).
    num_slots: staging slots on the device, each a buffer for the state of one subgroup, at least 1; two or more let
        copies in, updates and copies out overlap (count; default 2).
    cpu_threads: threads of the CPU lane; 0 for all cores (or as many as the quota of a container or batch job is worth)
        except one for the training thread of each rank on the host (count; default 0).
    device: "auto" uses the emulated device if there is no GPU; "emulated" always does (word; default "auto").
    device_memory_bytes: capacity of the emulated device; 0 for four times the bytes of the weights, plus the state
        (bytes; default 0).
    emulated: speeds of the emulated device (`EmulatedRates`; default EmulatedRates()).
    headroom_bytes: device memory that state must leave free (bytes; default 0).
    gradients: "keep" leaves gradients in `.grad`, and changes to `.grad` before `step()` are respected; "release" takes
        each gradient when it arrives and frees it as soon as it was copied or used: clip with `max_grad_norm`, and put
        all but the last backward of a step into `with optimizer.accumulate():` (word; default "keep").
    accumulation: with "release", where gradients of a step's backward passes before the last one are stored: "device"
        leaves them in `.grad`; "host" adds each to a sum in host memory, rounded as torch rounds sums in `.grad`;
        "host_fp32" adds in fp32 and rounds once. With the last two, `.grad` is None between two backward passes, and
        the device has no gradients; only `optimizer.zero_grad()` drops the sums, not `model.zero_grad()`
        (word; default "device").
    gradient_memory_bytes: with "release", device memory for gradients. Gradients that wait for the update and do not
        fit are spilled to the host and copied back with their state; a backward waits for copies while its next
        gradient would not fit. 0 for the memory that weights, state and headroom leave; activations are not counted,
        so set this or `headroom_bytes` if activations take much of the device (bytes; default 0).
    policy: "interleaved" runs copies and updates at the same time (Deep Optimizer States, section 4.1). Two other
        policies are baselines: "sequential" runs copies and updates one at a time; "twinflow" also runs one at a time,
        and updates on the device only subgroups whose state stays there (word; default "interleaved").
    watchdog_seconds: longest duration of one op (a copy, an update, a read, a write), more than 0; LaneStuckError is
        raised if it takes longer (seconds; default 120.0).
    paths: storage for state that is neither on the device nor in host memory: directories or "s3://bucket/prefix", by
        name; or `PathSettings`, `ObjectSettings` (places by name; default {}).
    tier_split: weights that divide this state among the paths, "nvme:2,pfs:1"; "auto": by measured speeds; "eq1": in
        proportion to the slower of read and write bandwidth of each path (MLP-Offload, Eq. 1)
        (weights; default "auto").
    host_cache: host memory that holds some of this state between steps, as a number or as "8GiB"; "auto": 90 % of the
        available host memory minus other buffers, in equal parts for the ranks of a host (bytes; default "auto").
    order: "pinned" keeps the same subgroups in the host cache; "alternate" runs every other update backwards and keeps
        the subgroups that the next update begins with (MLP-Offload, section 3.2); "auto": pinned
        (word; default "auto").
    host_slots: staging slots in host memory for each path, at least 1; three let a fetch, an update and a flush overlap
        (MLP-Offload, section 3.1) (count; default 3).

    Raises ConfigError for a value of another type or out of these bounds; for a knob, this is a KnobError (a subclass).
    """

    stride: Stride = AUTO
    static_ratio: float = 0.0
    subgroup_numel: int = 100_000_000
    num_slots: int = 2
    cpu_threads: int = 0
    device: DeviceChoice = "auto"
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
    order: Order = AUTO
    host_slots: int = 3

    def __post_init__(self) -> None:
        _check_paths(self.paths)
        for name in self.paths:
            check_path_name(name)
        self.path_settings()
        self.knobs()
        for name, minimum in _LEAST.items():
            object.__setattr__(self, name, check_whole(name, getattr(self, name), minimum))
        check_number("watchdog_seconds", self.watchdog_seconds, above=0.0)
        check_kind("emulated", self.emulated, EmulatedRates, "tidegate.EmulatedRates(...)")
        check_word("device", self.device, get_args(DeviceChoice))
        check_word("gradients", self.gradients, get_args(Mode))
        check_word("accumulation", self.accumulation, get_args(Accumulation))
        check_word("policy", self.policy, get_args(Policy))
        if self.accumulation != "device" and self.gradients == "keep":
            raise ConfigError(
                f"accumulation={self.accumulation!r} needs gradients='release': with gradients='keep' the sum of the "
                "gradients is in `.grad`. Set gradients='release', or leave accumulation out."
            )

    def knobs(self) -> Knobs:
        """The initial values of the knobs. Raises KnobError for values that are out of range or that need paths when no
        paths are given."""
        wanted: dict[str, Any] = {"stride": self.stride, "static_ratio": self.static_ratio}
        wanted |= {name: getattr(self, name) for name in PATH_KNOBS if getattr(self, name) != AUTO}
        return Knobs().changed(wanted, specs_for(tuple(self.paths)))

    def path_settings(self) -> dict[str, PathSettings | ObjectSettings]:
        """The settings of each path by name, in the given order. Raises ConfigError for the address of an unknown
        object store."""
        return {name: _settings(path) for name, path in self.paths.items()}


def as_offload(given: Any) -> Offload:
    """Returns the argument `offload` of the optimizer, or the default settings for None. Raises ConfigError if it is
    not an `Offload`."""
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
    raise ConfigError(f"offload={given!r} is a {type(given).__name__}, not a tidegate.Offload: {remedy}.")


def _check_paths(paths: Any) -> None:
    """Raises ConfigError unless `paths` maps names to directories, addresses or settings."""
    if isinstance(paths, str | os.PathLike):
        place = os.fspath(paths)
        last = place.rstrip("/").rpartition("/")[2]
        name = last if re.fullmatch(r"[a-z0-9_-]{1,32}", last) and last not in ("host", "device") else "path"
        raise ConfigError(f"paths={place!r} has no name: write paths={{{name!r}: {place!r}}}.")
    if not isinstance(paths, Mapping):
        raise ConfigError(
            f"paths={paths!r} is a {type(paths).__name__}: give names and directories, {{'nvme': '/nvme/tide'}}, "
            "or {} for no storage."
        )
    for name, place in paths.items():
        check_text("a name in paths", name, "nvme")
        if not isinstance(place, str | os.PathLike | PathSettings | ObjectSettings):
            raise ConfigError(
                f"paths={{{name!r}: {place!r}}} is not a valid location: give a directory, an address of an object "
                "store, PathSettings or ObjectSettings."
            )


def _settings(path: str | os.PathLike[str] | PathSettings | ObjectSettings) -> PathSettings | ObjectSettings:
    if isinstance(path, PathSettings | ObjectSettings):
        return path
    if isinstance(path, str) and "://" in path:
        return ObjectSettings(url=path)
    return PathSettings(directory=path)
