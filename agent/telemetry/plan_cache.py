"""Something of each of the plans that ran last."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from tidegate.plan import Plan

RECENT_PLANS: Final = 2
"""Two take turns where orders alternate."""

T = TypeVar("T")


class RecentPlans(Generic[T]):
    """Forgets what was asked for longest ago: a plan that ran only once does not push out one that runs every other
    step. Plans are told apart by identity: comparing them costs more than what is kept."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Plan, T]] = deque(maxlen=RECENT_PLANS)

    def get(self, plan: Plan) -> T | None:
        found = next((index for index, (known, _) in enumerate(self._kept) if known is plan), None)
        if found is None:
            return None
        kept = self._kept[found]
        del self._kept[found]
        self._kept.append(kept)
        return kept[1]

    def add(self, plan: Plan, value: T) -> T:
        """Of a plan of which nothing is kept."""
        self._kept.append((plan, value))
        return value
