"""The collective at the end of each step, in which ranks exchange one small message: generation of knobs, update time,
flags of the tuner."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.agent.ranks import Ranks

GENERATIONS_DIFFER = -1
"""Value in place of a generation: the ranks know different generations of knobs."""


@dataclass(frozen=True, kw_only=True)
class BoundaryMessage:
    """Values that one rank contributes at the end of a step, or the combined result for all ranks.

    generation: newest generation of knobs that the rank knows. Result: the generation, if it is the same on all ranks,
        else GENERATIONS_DIFFER.
    update_seconds: duration of the last update. Result: the longest of all ranks; None when a rank has none.
    wants_search: whether the rank's tuner wants to search for better knobs now. Result: True if all tuners want it.
    proposal_applied: whether the rank could apply the tuner's last proposal. Result: True if all ranks could apply it.
    rates_changed: whether a rate of the rank has changed permanently. Result: True if this is so on any rank.
    """

    generation: int = 0
    update_seconds: float | None = None
    wants_search: bool = False
    proposal_applied: bool = True
    rates_changed: bool = False


def agree(ranks: Ranks, mine: BoundaryMessage) -> BoundaryMessage:
    """Combines the messages of all ranks. A collective: all ranks call it at the same step, and get the same result."""
    seconds = mine.update_seconds
    least = ranks.all_reduce_min([
        mine.generation, -mine.generation, -(seconds or 0.0), -1.0 if seconds is None else 1.0,
        mine.wants_search, mine.proposal_applied, -mine.rates_changed,
    ])  # fmt: skip
    low, high = int(least[0]), -int(least[1])
    return BoundaryMessage(
        generation=low if low == high else GENERATIONS_DIFFER,
        update_seconds=-least[2] if least[3] > 0 else None,
        wants_search=bool(least[4]),
        proposal_applied=bool(least[5]),
        rates_changed=bool(least[6]),
    )
