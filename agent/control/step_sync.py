"""What ranks tell each other at the end of every step, in one small collective."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.agent.ranks import Ranks

SPLIT = -1
"""Stands for a generation that not all ranks know."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What one rank says, or what holds for all of them.

    generation: the newest that it knows; SPLIT when some have heard of a newer one than others.
    update_seconds: of the update that ended last; of all ranks the longest, None when one of them has none.
    may_look: the tuner would look now. is_well: what was last proposed could be had. rates_changed: of some rank, for
    good.
    """

    generation: int = 0
    update_seconds: float | None = None
    may_look: bool = False
    is_well: bool = True
    rates_changed: bool = False


def agree(ranks: Ranks, mine: Boundary) -> Boundary:
    """For all ranks to call, at the same boundary: each gets the same answer."""
    seconds = mine.update_seconds
    least = ranks.all_reduce_min([
        mine.generation, -mine.generation, -(seconds or 0.0), -1.0 if seconds is None else 1.0,
        mine.may_look, mine.is_well, -mine.rates_changed,
    ])  # fmt: skip
    low, high = int(least[0]), -int(least[1])
    return Boundary(
        generation=low if low == high else SPLIT,
        update_seconds=-least[2] if least[3] > 0 else None,
        may_look=bool(least[4]),
        is_well=bool(least[5]),
        rates_changed=bool(least[6]),
    )
