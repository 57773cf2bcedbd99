"""The knobs as numbers, and what those of storage say: what stays in host memory, and how the rest is divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.knobs.knobs import EQ1, Off
from tidegate.plan.tasks import Order
from tidegate.plan.tier_split import Counts, PathSpeeds, balanced_split, eq1_split, user_split

Eq1 = Literal["eq1"]
Split = tuple[tuple[str, float], ...] | Eq1 | None
"""Weights by path; `eq1` for Eq. 1 of MLP-Offload; None for what measured speeds call for."""


@dataclass(frozen=True)
class Effective:
    """The knobs as numbers: what the next plan is made from. The last three mean nothing without paths.

    alternate: every other step runs backwards.
    """

    stride: float | Off
    static_ratio: float
    tier_split: Split = None
    host_cache_bytes: int = 0
    alternate: bool = False


def cached(state_bytes: Sequence[int], movable: Sequence[int], effective: Effective, order: Order) -> set[int]:
    """Which of the `movable` subgroups stay in host memory after a step in this order.

    state_bytes: of each subgroup, by id. The first ones stay, or those that the next step, in the other order, begins
    with.
    """
    # Those that come are in memory before those that leave are gone.
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
) -> Counts:
    """Subgroups of each path of `speeds`, as the split says; a path that weights do not name gets none.

    capacity, minimum: as in `balanced_split`; the minimum only counts where speeds decide. CapacityError when they do
    not all fit.
    """
    if split is None:
        return balanced_split(count, speeds, capacity=capacity, minimum=minimum)
    if split == EQ1:
        return eq1_split(count, speeds, capacity=capacity)
    weights = dict(split)
    return user_split(count, {name: weights.get(name, 0.0) for name in speeds}, capacity=capacity)
