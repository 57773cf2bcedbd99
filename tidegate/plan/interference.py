"""Interference: how much lanes slow each other down, as reads and writes of a disk do, or all users of a memory bus.

A measured factor for each pair of lanes says how much one slows down the other. If the resources that ops share (such
as a memory bus) are known, too, ops get fair shares of them, by dominant resource fairness (Ghodsi et al., "Dominant
Resource Fairness", NSDI '11). The dominant resource of an op is the one of which it needs the largest share. The shares
that ops get of their dominant resources grow equally. The share of an op stops growing when a resource that it uses is
full, or when the op has reached the speed that the factors allow. So half of a node with half of its ranks gives the
same result as the whole node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Final, TypeVar

from tidegate.plan.ops import Op

InterferenceFactors = Mapping[str, Mapping[str, float]]
"""Interference factors: `keeps[lane][other]` is the speed of `lane` while `other` works, divided by its speed alone;
above 0 and up to 1. Absent entries are 1. The slowdowns by several other lanes add up (`relative_speed`)."""
PairFactors = tuple[float, float]
"""The interference factors of two lanes, as of the reads and the writes of a path: the factor of the first lane while
the second works, then the factor of the second lane while the first works."""
HALF_DUPLEX: Final[PairFactors] = (0.5, 0.5)
"""Factors of reads and writes that share the bandwidth of their device: the times of both add up."""
DUPLEX: Final[PairFactors] = (1.0, 1.0)
"""Factors of reads and writes that run at full speed at the same time."""
Demand = Mapping[str, float]
"""The share of each resource that an op uses at full speed. Above 1: the op cannot run at full speed even alone."""
Lane = tuple[int, str]
"""A lane: index of its plan (the rank), and name."""
Name = TypeVar("Name", bound=Hashable)


def pair_factors(keeps: InterferenceFactors, lane: str, other: str) -> PairFactors:
    """The interference factors of these two lanes."""
    return keeps.get(lane, {}).get(other, 1.0), keeps.get(other, {}).get(lane, 1.0)


def both_seconds(seconds: float, other_seconds: float, factors: PairFactors) -> float:
    """The shortest time in seconds for the work of two lanes that slow each other down: one after the other; or both at
    once until the shorter work is done, then the rest of the longer work alone.

    seconds, other_seconds: time that each lane needs for its work alone.
    """
    factor, other_factor = factors
    at_once = max(
        other_seconds + (1 - other_factor) * seconds / factor, seconds + (1 - factor) * other_seconds / other_factor
    )
    return min(seconds + other_seconds, at_once)


def relative_speed(lane: str, at_work: Collection[str], keeps: InterferenceFactors) -> float:
    """The speed of `lane` while the lanes `at_work` (it may be among them) work, divided by its speed alone.

    A lane with a factor of 1/2 takes twice as long: for each second of its own work it waits one second for the other
    lane. While two such lanes work, it waits two seconds and has 1/3 of its speed, as three lanes do that take turns on
    one disk.
    """
    lost = (1 / share - 1 for other, share in keeps.get(lane, {}).items() if other in at_work and other != lane)
    return 1 / (1 + math.fsum(lost))


def lane_speeds(
    at_work: Mapping[Lane, Op], keeps: InterferenceFactors, demand: Callable[[Op], Demand] | None = None
) -> dict[Lane, float]:
    """The speed of each lane that is at work, above 0 and up to 1; 1 is the speed of the lane alone.

    The interference factors give a speed, and fair shares of the resources reduce it further. demand: gives the share
    of each resource that an op uses at full speed; at a lower speed it uses less in proportion. None: no shared
    resources are known.
    """
    names = {name for _, name in at_work}
    speeds = {lane: relative_speed(lane[1], names, keeps) if lane[1] in keeps else 1.0 for lane in at_work}
    if demand is None:
        return speeds
    fair = fair_speeds(
        {lane: {name: share * speeds[lane] for name, share in demand(op).items()} for lane, op in at_work.items()}
    )
    return {lane: speed * fair[lane] for lane, speed in speeds.items()}


def fair_speeds(demands: Mapping[Name, Demand]) -> dict[Name, float]:
    """The speed of each op that is running: above 0 and up to 1; 1 is its speed with all resources to itself."""
    used: dict[str, float] = {}
    dominant = {name: max(demand.values(), default=0.0) for name, demand in demands.items()}
    speeds = {name: 1.0 for name in demands if dominant[name] <= 0}
    order = [name for name in demands if dominant[name] > 0]
    while order:
        wanted: dict[str, float] = {}
        for name in order:
            for resource, share in demands[name].items():
                wanted[resource] = wanted.get(resource, 0.0) + share / dominant[name]
        level, full = min(dominant[name] for name in order), ""
        for resource, slope in wanted.items():
            reach = max(0.0, 1.0 - used.get(resource, 0.0)) / slope if slope > 0 else math.inf
            if reach < level:
                level, full = reach, resource
        left: list[Name] = []
        for name in order:
            if not (demands[name].get(full, 0.0) > 0 if full else dominant[name] <= level):
                left.append(name)
                continue
            speeds[name] = level / dominant[name]
            for resource, share in demands[name].items():
                used[resource] = used.get(resource, 0.0) + share * speeds[name]
        order = left
    return speeds
