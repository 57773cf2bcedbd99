"""Resolves `auto` knobs to the values that they stand for at present, and converts the values in use to knob values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.knobs.knobs import Knobs, KnobValue, Off
from tidegate.plan import Policy
from tidegate.plan.effective_knobs import EffectiveKnobs, resolve
from tidegate.tuner.search import START_STRIDE


@dataclass(frozen=True, slots=True)
class AutoValues:
    """The values that `auto` stands for, by knob. The knob `static_ratio` cannot be `auto`; `tier_split=auto` has no
    value here, because the measured speeds decide."""

    stride: float | Off = START_STRIDE
    alternate: bool = False
    cache_bytes: int = 0

    def changed(self, stride: float | Off | None, alternate: bool | None, cache_bytes: int | None) -> AutoValues:
        """Returns a copy in which the arguments that are not None replace the values."""
        return AutoValues(
            self.stride if stride is None else stride,
            self.alternate if alternate is None else alternate,
            self.cache_bytes if cache_bytes is None else cache_bytes,
        )

    def effective(self, knobs: Knobs, policy: Policy) -> EffectiveKnobs:
        """Returns the values with which the engine works: those of `knobs`, where `auto` is replaced by the value that
        it stands for. With the policy `twinflow`, the stride is always "off"."""
        return resolve(
            knobs, stride=self.stride, alternate=self.alternate, cache_bytes=self.cache_bytes,
            static_stride=policy == "twinflow",
        )  # fmt: skip


def as_knob_values(effective: EffectiveKnobs, subgroups_by_path: Mapping[str, int] | None) -> dict[str, KnobValue]:
    """Converts the values with which the engine works to knob values, by name of the knob.

    subgroups_by_path: number of subgroups on each path, which becomes the value of `tier_split`; None if the run has no
    paths: `tier_split`, `host_cache` and `order` are then left out.
    """
    values: dict[str, KnobValue] = {"stride": effective.stride, "static_ratio": effective.static_ratio}
    if subgroups_by_path is not None:
        values["tier_split"] = ",".join(f"{name}:{count}" for name, count in sorted(subgroups_by_path.items()))
        values["host_cache"] = effective.host_cache_bytes
        values["order"] = "alternate" if effective.alternate else "pinned"
    return values
