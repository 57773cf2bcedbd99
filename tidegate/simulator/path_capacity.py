"""Check whether the storage paths have enough capacity for given knobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tidegate.errors import CapacityError
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import is_path
from tidegate.simulator.steady_state import Rank, steady_steps
from tidegate.speeds.rate_card import RateCard


def capacity_shortfall(rank: Rank, effective: EffectiveKnobs, rates: RateCard) -> str:
    """A sentence that names the paths that would get more subgroups than they can hold, and the paths that take the
    excess; empty when everything fits.

    If all paths together lack capacity, the sentence says so. Otherwise, where speeds decide the split, it is empty:
    then no path gets more than it can hold. ConfigError when the speed of a path is not known.
    """
    if not rank.host_slots:
        return ""
    try:
        given = _stored(rank, effective, rates)
    except CapacityError as error:
        return str(error)
    if effective.tier_split is None:
        return ""
    wanted = _stored(replace(rank, capacity=dict.fromkeys(rank.retired, 0)), effective, rates)
    full = [
        f"path {path} would get {count:,} subgroups and can hold {given[path]:,}"
        for path, count in wanted.items()
        if given[path] < count
    ]
    if not full:
        return ""
    more = [f"{path} takes {count:,}" for path, count in given.items() if count > wanted[path]]
    sentence = " and ".join(full) + "; " + ", ".join(more)
    return f"{sentence[0].upper()}{sentence[1:]}. Give it less of tier_split, free space there, or raise host_cache."


def _stored(rank: Rank, effective: EffectiveKnobs, rates: RateCard) -> Counter[str]:
    """The number of subgroups on each path at the end of a step."""
    step = steady_steps(rank, effective, rates)[0]
    return Counter(placement.after for placement in step.placements if is_path(placement.after))
