"""The resolved knobs (no `auto`), and the use of the storage knobs: which subgroups stay in the host cache, and how the
rest is divided among the paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.knobs.knobs import AUTO, EQ1, OFF, Knobs, Off, weights_of
from tidegate.plan.tasks import StepOrder
from tidegate.plan.tier_split import PathSpeeds, SubgroupCounts, balanced_split, eq1_split, user_split

Eq1 = Literal["eq1"]
Split = tuple[tuple[str, float], ...] | Eq1 | None
"""The tier split: weights by path; `eq1` for Eq. 1 of MLP-Offload; None for the split that measured speeds decide."""


@dataclass(frozen=True)
class EffectiveKnobs:
    """The resolved knobs (`auto` replaced by a value), from which the next plan is made.

    `tier_split`, `host_cache_bytes` and `alternate` have no effect without storage paths.
    alternate: every other step updates the subgroups in descending order.
    """

    stride: float | Off
    static_ratio: float
    tier_split: Split = None
    host_cache_bytes: int = 0
    alternate: bool = False


def resolve(
    knobs: Knobs, *, stride: float | Off, alternate: bool, cache_bytes: int, static_stride: bool = False
) -> EffectiveKnobs:
    """The knobs as numbers. `stride`, `alternate` and `cache_bytes` are the values that `auto` stands for.

    static_stride: the policy of the run updates no other subgroups than residents on the device, so that the stride is
    always `off`.
    """
    wanted = stride if knobs.stride == AUTO else knobs.stride
    return EffectiveKnobs(
        stride=OFF if static_stride or wanted == OFF else float(wanted),
        static_ratio=knobs.static_ratio,
        tier_split=_split(knobs.tier_split),
        host_cache_bytes=cache_bytes if knobs.host_cache == AUTO else int(knobs.host_cache),
        alternate=alternate if knobs.order == AUTO else knobs.order == "alternate",
    )


def _split(text: str) -> Split:
    if text == EQ1:
        return EQ1
    return None if text == AUTO else tuple(weights_of(text).items())


def host_cached_ids(
    state_bytes: Sequence[int], movable: Sequence[int], effective: EffectiveKnobs, order: StepOrder
) -> set[int]:
    """The ids of the `movable` subgroups whose state stays in the host cache after a step in this order.

    state_bytes: bytes of state of each subgroup, by id. The first movable subgroups stay; where orders alternate, the
    subgroups with which the next step (in the other order) begins.
    """
    # Where orders alternate, incoming subgroups are in memory before outgoing subgroups are freed: half the cache each.
    room = effective.host_cache_bytes // (2 if effective.alternate else 1)
    backwards = effective.alternate and order == "ascending"
    stay: set[int] = set()
    for i in reversed(movable) if backwards else movable:
        room -= state_bytes[i]
        if room < 0:
            break
        stay.add(i)
    return stay


def divide(
    count: int,
    split: Split,
    speeds: Mapping[str, PathSpeeds],
    *,
    capacity: Mapping[str, int] | None = None,
    minimum: int = 0,
) -> SubgroupCounts:
    """The number of subgroups for each path of `speeds`, according to the split; a path without a weight gets none.

    capacity: the maximum number of subgroups of each path; a path that it does not name has no limit. CapacityError if
    not all subgroups fit. minimum: each path gets at least this number of subgroups, if its capacity allows this and
    there are enough subgroups for all paths; used only if `split` is None.
    """
    if split is None:
        return balanced_split(count, speeds, capacity=capacity, minimum=minimum)
    if split == EQ1:
        return eq1_split(count, speeds, capacity=capacity)
    weights = dict(split)
    return user_split(count, {name: weights.get(name, 0.0) for name in speeds}, capacity=capacity)
