"""What knobs mean: `auto` is replaced by what it stands for at present, and what is in force is told as knobs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.knobs.knobs import AUTO, EQ1, Knobs, KnobValue, Off, weights_of
from tidegate.plan import Policy
from tidegate.plan.effective_knobs import Effective, Split
from tidegate.tuner.search import START_STRIDE


@dataclass(frozen=True, slots=True)
class Auto:
    """What `auto` of each knob stands for; static ratio and tier split need nothing."""

    stride: float | Off = START_STRIDE
    alternate: bool = False
    cache_bytes: int = 0

    def changed(self, stride: float | Off | None, alternate: bool | None, cache_bytes: int | None) -> Auto:
        """With those that are not None."""
        return Auto(
            self.stride if stride is None else stride,
            self.alternate if alternate is None else alternate,
            self.cache_bytes if cache_bytes is None else cache_bytes,
        )

    def effective(self, knobs: Knobs, policy: Policy) -> Effective:
        """What these knobs mean; the baseline `twinflow` has no stride whatever they say."""
        stride: float | Off = self.stride if knobs.stride == AUTO else knobs.stride
        if policy == "twinflow":
            stride = "off"
        split: Split = None
        if knobs.tier_split == EQ1:
            split = EQ1
        elif knobs.tier_split != AUTO:
            split = tuple(weights_of(knobs.tier_split).items())
        cache = self.cache_bytes if knobs.host_cache == AUTO else int(knobs.host_cache)
        alternate = self.alternate if knobs.order == AUTO else knobs.order == "alternate"
        return Effective(stride, knobs.static_ratio, split, cache, alternate)


def in_force(effective: Effective, on_paths: Mapping[str, int] | None) -> dict[str, KnobValue]:
    """Values as knobs have them. on_paths: subgroups by path; None without paths, and there are no knobs for them."""
    values: dict[str, KnobValue] = {"stride": effective.stride, "static_ratio": effective.static_ratio}
    if on_paths is not None:
        values["tier_split"] = ",".join(f"{name}:{count}" for name, count in sorted(on_paths.items()))
        values["host_cache"] = effective.host_cache_bytes
        values["order"] = "alternate" if effective.alternate else "pinned"
    return values
