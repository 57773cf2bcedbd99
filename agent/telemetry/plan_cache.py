"""Small LRU cache with one value for each recently run plan."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from tidegate.plan import Plan

RECENT_PLANS: Final = 2
"""Maximum number of cached plans. Two, because updates with the knob `order=alternate` use two plans in turn."""

T = TypeVar("T")


class RecentPlans(Generic[T]):
    """LRU cache with plans as keys. It has room for RECENT_PLANS plans; when it is full, the plan that was used longest
    ago is dropped. Plans are compared by identity, because comparing their content costs more than computing the value
    again."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Plan, T]] = deque(maxlen=RECENT_PLANS)

    def get(self, plan: Plan) -> T | None:
        """The cached value of a plan; None when there is none."""
        index = next((i for i, (known, _) in enumerate(self._kept) if known is plan), None)
        if index is None:
            return None
        kept = self._kept[index]
        del self._kept[index]
        self._kept.append(kept)
        return kept[1]

    def add(self, plan: Plan, value: T) -> T:
        """Caches a value for a plan that has none, and returns the value."""
        self._kept.append((plan, value))
        return value
