"""The tier split: the number of subgroups that each storage path gets, and the path of each subgroup.

MLP: Maurya et al., "MLP-Offload", SC '25. Pure functions with exact (rational) arithmetic: equal arguments give equal
results. Paths have the order of the mapping that names them; ties go to the path that comes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from tidegate.errors import CapacityError, ConfigError
from tidegate.plan.interference import HALF_DUPLEX, PairFactors, both_seconds

SubgroupCounts = dict[str, int]
"""The number of subgroups of each path, by name of the path."""

MINIMUM_GAIN: Final = 0.05
"""Smallest gain for which subgroups move to another path, as a share of the makespan."""
_REMEDY: Final = "Free space on a path, add one, or raise host_cache."


@dataclass(frozen=True, kw_only=True)
class PathSpeeds:
    """The speeds of one path, in bytes per second, each measured while the other direction is idle.

    factors: the interference factors of reads and writes. By default both share the path's bandwidth: their times add
    up.
    """

    read_bytes_per_second: float
    write_bytes_per_second: float
    factors: PairFactors = HALF_DUPLEX

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_second", "write_bytes_per_second"):
            rate = getattr(self, name)
            if not 0 < rate < float("inf"):
                raise ConfigError(f"{name}={rate!r} of a path must be positive and finite: calibrate the path again.")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that the path needs for each byte that is read once and written once. The interference factors
        decide: the sum of both times if the directions share the bandwidth, the longer time if neither slows the other
        down, or a value between."""
        return both_seconds(1 / self.read_bytes_per_second, 1 / self.write_bytes_per_second, self.factors)


def makespan_seconds(counts: Mapping[str, int], rates: Mapping[str, PathSpeeds], subgroup_bytes: int) -> float:
    """Seconds until the last path is done, if all paths work at the same time and each reads and writes its subgroups
    (`subgroup_bytes` each) once.

    This is the lower bound of the storage time: it assumes that a path never waits.
    """
    return max((n * rates[name].seconds_per_byte for name, n in counts.items()), default=0.0) * subgroup_bytes


def eq1_split(
    count: int, rates: Mapping[str, PathSpeeds], *, capacity: Mapping[str, int] | None = None
) -> SubgroupCounts:
    """Divides `count` subgroups by Eq. 1 of MLP-Offload: the share of a path is B_i / ΣB, with B_i the smaller of its
    read and write bandwidth.

    Rounded to whole subgroups by largest remainder. capacity: the maximum number of subgroups of each path; a path that
    it does not name has no limit. The other paths take the excess, by the same rule. CapacityError if not all subgroups
    fit.
    """
    bandwidths = {
        name: Fraction(min(rate.read_bytes_per_second, rate.write_bytes_per_second)) for name, rate in rates.items()
    }
    return _proportional(count, bandwidths, capacity or {})


def user_split(
    count: int, weights: Mapping[str, float], *, capacity: Mapping[str, int] | None = None
) -> SubgroupCounts:
    """Divides `count` subgroups in proportion to `weights`, such as {"nvme": 2, "pfs": 1}, by largest remainder. A path
    of weight 0 gets none.

    capacity: the maximum number of subgroups of each path; a path that it does not name has no limit. The other paths
    take the excess. ConfigError if a weight is below 0 or not finite, or no weight is above 0. CapacityError if not all
    subgroups fit.
    """
    shown = ",".join(f"{name}:{weight:g}" for name, weight in weights.items())
    if not all(0 <= weight < float("inf") for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(
            f"Subgroups cannot be divided by the weights {shown!r}: give finite numbers of at least 0, and at least "
            "one above 0."
        )
    return _proportional(count, {name: Fraction(weight) for name, weight in weights.items()}, capacity or {})


def balanced_split(
    count: int, rates: Mapping[str, PathSpeeds], *, capacity: Mapping[str, int] | None = None, minimum: int = 0
) -> SubgroupCounts:
    """Divides `count` subgroups so that the makespan (the time until the last path is done) is as short as possible.

    Takes into account read speed, write speed, and whether reads and writes slow each other down; Eq. 1 of MLP-Offload
    uses only the slower direction. The greedy algorithm is optimal: each subgroup goes to the path where it would be
    done first, and as the time of a path only grows with its subgroups, no exchange gives a shorter makespan. capacity:
    the maximum number of subgroups of each path; a path that it does not name has no limit. CapacityError if not all
    subgroups fit. minimum: each path gets at least this number of subgroups, if its capacity allows this; ignored if
    there are not enough subgroups for all paths.
    """
    rooms = {name: _room(name, count, capacity or {}) for name in rates}
    _require_room(count, rooms)
    counts = {name: min(minimum, room) for name, room in rooms.items()}
    if sum(counts.values()) > count:
        counts = dict.fromkeys(rates, 0)
    cost = {name: rate.seconds_per_byte for name, rate in rates.items()}
    order = {name: place for place, name in enumerate(rates)}
    queue = [((counts[name] + 1) * cost[name], order[name], name) for name in rates if counts[name] < rooms[name]]
    heapq.heapify(queue)
    for _ in range(count - sum(counts.values())):
        _, place, name = heapq.heappop(queue)
        counts[name] += 1
        if counts[name] < rooms[name]:
            heapq.heappush(queue, ((counts[name] + 1) * cost[name], place, name))
    return counts


def rebalanced(
    counts: Mapping[str, int],
    rates: Mapping[str, PathSpeeds],
    *,
    capacity: Mapping[str, int] | None = None,
    minimum: int = 1,
    minimum_gain: float = MINIMUM_GAIN,
) -> SubgroupCounts | None:
    """A better split of the same number of subgroups by these speeds; None to keep `counts`.

    A split is better if its makespan is shorter by `minimum_gain` (a share). capacity: most subgroups of each path; 0
    for a path that must not be used, such as a retired path. minimum: fewest subgroups of each path whose capacity is
    not 0, if there are enough. A split is returned whatever its gain when `counts` no longer fit, or when they give
    nothing to a path that must get some. CapacityError when no split fits.
    """
    limits = capacity or {}
    best = balanced_split(sum(counts.values()), rates, capacity=limits, minimum=minimum)
    if any(n > limits.get(name, n if name in rates else 0) for name, n in counts.items()):
        return best
    usable = [name for name in rates if limits.get(name, 1) > 0]
    if all(best[name] for name in usable) and not all(counts.get(name) for name in usable):
        return best
    now, then = makespan_seconds(counts, rates, 1), makespan_seconds(best, rates, 1)
    return best if then < (1 - minimum_gain) * now else None


def assign_paths(
    ids: Sequence[int], counts: Mapping[str, int], current: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The path of each subgroup: `counts[path]` subgroups per path, with as few changes from `current` as possible.

    Paths are spread evenly over the order of `ids`, so that all of them work at the same time: without `current`, the
    number of subgroups of a path among the first k ids differs by less than one from k × its share. Subgroups that must
    move are chosen for evenness, too. Ids in `current` that are not in `ids` are ignored; subgroups on paths that are
    not in `counts` move to another path.
    """
    if sum(counts.values()) != len(ids):
        raise ConfigError(
            f"The counts of the paths add up to {sum(counts.values())} subgroups, but there are {len(ids)} subgroups: "
            "give counts with this sum."
        )
    now = {i: path for i in ids if (path := (current or {}).get(i)) in counts}
    held = Counter(now.values())
    keeps = {path: min(held[path], n) for path, n in counts.items()}
    leaves = {path: held[path] - keeps[path] for path in counts}
    takes = {path: n - keeps[path] for path, n in counts.items()}
    given = dict.fromkeys(counts, 0)
    order = {path: place for place, path in enumerate(counts)}
    assigned: dict[int, str] = {}

    def urgency(path: str, place: int) -> tuple[bool, int, int]:
        """Sort key of a path for the subgroup at `place` in `ids` (counted from 1); the path with the lowest key gets
        the subgroup. Paths that have fewer subgroups than their share of the first `place` ids come first. Among
        equals, the path that must get its next subgroup earliest to keep its share (earliest deadline first, as in
        pfair scheduling)."""
        early = given[path] * len(ids) >= place * counts[path]
        return early, -(-(given[path] + 1) * len(ids) // counts[path]), order[path]

    for place, i in enumerate(ids, start=1):
        home = now.get(i)
        choices = [] if home is not None and not leaves[home] else [path for path in counts if takes[path]]
        if home is not None and keeps[home]:
            choices.append(home)
        path = min(choices, key=lambda choice: urgency(choice, place))
        if path == home:
            keeps[path] -= 1
        else:
            takes[path] -= 1
            if home is not None:
                leaves[home] -= 1
        given[path] += 1
        assigned[i] = path
    return assigned


def _proportional(count: int, weights: Mapping[str, Fraction], capacity: Mapping[str, int]) -> SubgroupCounts:
    """Divides `count` subgroups in proportion to `weights`, by largest remainder. Paths whose share is larger than
    their capacity are filled, and the other subgroups are divided among the other paths."""
    open_weights = {name: weight for name, weight in weights.items() if weight > 0}
    rooms = {name: _room(name, count, capacity) if name in open_weights else 0 for name in weights}
    _require_room(count, rooms)
    counts = dict.fromkeys(weights, 0)
    while left := count - sum(counts.values()):
        shares = _largest_remainder(left, open_weights)
        over = [name for name, share in shares.items() if share > rooms[name]]
        if not over:
            return counts | shares
        for name in over:
            counts[name] = rooms[name]
            del open_weights[name]
    return counts


def _largest_remainder(count: int, weights: Mapping[str, Fraction]) -> SubgroupCounts:
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def _room(name: str, count: int, capacity: Mapping[str, int]) -> int:
    return min(count, max(0, capacity.get(name, count)))


def _require_room(count: int, rooms: Mapping[str, int]) -> None:
    total = sum(rooms.values())
    if total < count:
        each = ", ".join(f"{name} takes {room}" for name, room in rooms.items()) or "there is no path"
        raise CapacityError(
            f"{count} subgroups do not fit on the paths: {each}, {total} in all. {_REMEDY}", count, total
        )
