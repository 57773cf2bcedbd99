"""The knobs: the settings that can be changed while training runs, with their bounds and their parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tidegate.errors import KnobError
from tidegate.knobs.kinds import KnobKind, KnobSpec, KnobValue, check_path_name, weights_of

__all__ = [
    "AUTO",
    "EQ1",
    "OFF",
    "PATH_KNOBS",
    "SPECS",
    "Auto",
    "KnobKind",
    "KnobSpec",
    "KnobValue",
    "Knobs",
    "Off",
    "Order",
    "Stride",
    "check_path_name",
    "device_share",
    "same",
    "show",
    "spec",
    "specs_for",
    "weights_of",
]

Auto = Literal["auto"]
Off = Literal["off"]
Stride = float | Auto | Off
Order = Literal["auto", "pinned", "alternate"]
"""Values of the knob `order`. `pinned`: each step updates the subgroups in ascending order. `alternate`: every other
step updates them in descending order. `auto`: the tuner chooses."""

AUTO: Final = "auto"
EQ1: Final = "eq1"
"""Value of the knob `tier_split`: shares by bandwidth, Eq. 1 of MLP-Offload."""
OFF: Final = "off"

SPECS: Final[dict[str, KnobSpec]] = {
    spec.name: spec
    for spec in (
        KnobSpec(
            name="stride",
            minimum=1.0,
            maximum=1_000_000.0,
            words=(AUTO, OFF),
            unit="subgroups",
            help="Every stride-th subgroup that is not resident is updated on the device: device share = 1/stride.",
        ),
        KnobSpec(
            name="static_ratio",
            minimum=0.0,
            maximum=1.0,
            unit="share of subgroups",
            help="Share of the subgroups whose state stays on the device between updates.",
        ),
        KnobSpec(
            name="tier_split",
            kind="weights",
            minimum=0.0,
            maximum=1_000_000.0,
            words=(AUTO, EQ1),
            unit="subgroups, as weights",
            help="How the subgroups in storage are divided among the paths; one that is not named gets none. "
            "eq1: by the slower of each path's read and write bandwidth (MLP-Offload, Eq. 1). The effective value "
            "counts the subgroups that each path holds: all 0 if the host cache or the device holds everything.",
        ),
        KnobSpec(
            name="host_cache",
            kind="size",
            minimum=0.0,
            maximum=float(2**50),
            words=(AUTO,),
            unit="bytes",
            help="Host memory of each rank that holds tiered subgroups between steps.",
        ),
        KnobSpec(
            name="order",
            kind="choice",
            words=(AUTO, "pinned", "alternate"),
            help="pinned: the same subgroups stay in the host cache. alternate: every other update runs backwards.",
        ),
    )
}
PATH_KNOBS: Final = ("tier_split", "host_cache", "order")
"""The knobs that only runs with storage paths have; each of them may be `auto`."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """A complete set of desired knobs. KnobError at construction if a value is outside its bounds.

    tier_split: `auto`, `eq1`, or weights as text such as `nvme:2,pfs:1` (`weights_of`). host_cache: `auto` or bytes.
    """

    stride: Stride = AUTO
    static_ratio: float = 0.0
    tier_split: str = AUTO
    host_cache: int | Auto = AUTO
    order: Order = AUTO

    def __post_init__(self) -> None:
        for name, spec in SPECS.items():
            object.__setattr__(self, name, spec.parse(getattr(self, name)))

    def as_dict(self, *, paths: bool) -> dict[str, KnobValue]:
        """The knobs by name. `paths`: whether the run has storage paths. Without paths, the knobs in PATH_KNOBS are
        left out if their value is `auto`."""
        values: dict[str, KnobValue] = {name: getattr(self, name) for name in SPECS}
        return {n: value for n, value in values.items() if paths or n not in PATH_KNOBS or value != AUTO}

    def changed(self, changes: Mapping[str, Any], specs: Mapping[str, KnobSpec] = SPECS) -> Knobs:
        """These knobs with `changes` applied. `specs` (see `specs_for`) checks them: KnobError for names that it does
        not contain, and for values that it does not accept."""
        values: dict[str, Any] = {name: spec(name, specs).parse(value) for name, value in changes.items()}
        return replace(self, **values)

    def fitted(self, paths: Sequence[str]) -> Knobs:
        """These knobs, adapted to a run with the storage paths `paths`.

        Desired knobs survive a restart of the run, but its paths may change. Without paths, the knobs of paths are set
        to `auto`; so is a tier split that names a path that the run no longer has.
        """
        if not paths:
            return replace(self, tier_split=AUTO, host_cache=AUTO, order=AUTO)
        known = self.tier_split in (AUTO, EQ1) or set(weights_of(self.tier_split)) <= set(paths)
        return self if known else replace(self, tier_split=AUTO)


def specs_for(paths: Sequence[str]) -> dict[str, KnobSpec]:
    """The specs of the knobs of a run with these storage paths; without paths, the knobs of paths are left out."""
    if not paths:
        return {name: spec for name, spec in SPECS.items() if name not in PATH_KNOBS}
    return {**SPECS, "tier_split": replace(SPECS["tier_split"], paths=tuple(paths))}


def spec(name: str, specs: Mapping[str, KnobSpec] = SPECS) -> KnobSpec:
    """The spec of the knob `name`. KnobError if `specs` does not contain it; the message says why the run lacks the
    knob, or lists the known knobs."""
    if name in specs:
        return specs[name]
    if name in PATH_KNOBS:
        raise KnobError(f"{name} cannot be set: this run has no storage paths; start it with Offload(paths=…).", name)
    raise KnobError(f"There is no knob {name!r}. The knobs are: {', '.join(specs)}.", name)


def show(name: str, value: KnobValue) -> str:
    """The value of a knob as text for display. Values of knobs that this version does not know are not converted."""
    return SPECS[name].show(value) if name in SPECS else value if isinstance(value, str) else f"{value:g}"


def same(name: str, value: KnobValue, other: KnobValue) -> bool:
    """Whether both values of the knob `name` are equivalent."""
    return SPECS[name].same(value, other) if name in SPECS else value == other


def device_share(stride: float | Off) -> float:
    """Share of the non-resident subgroups that the device updates: 1/stride (Deep Optimizer States, Algorithm 1), or 0
    if the stride is `off`."""
    return 0.0 if stride == OFF else 1.0 / float(stride)
