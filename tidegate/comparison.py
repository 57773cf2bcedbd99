"""Comparison of times before and after a change: how much they differ, and whether the difference may be chance.

Times of steps have outliers and no normal distribution. So the size of the difference is the Hodges-Lehmann shift (the
median of all differences between a time after and a time before the change), and the Mann-Whitney rank test says how
often chance alone gives such a difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median
from typing import Final, Literal

Difference = Literal["faster", "slower", "no clear difference"]
ERROR_RATE: Final = 0.01
"""Largest probability of a difference by chance alone with which it still counts as clear."""
EXACT_PAIRS: Final = 64
"""Largest number of pairs (a time before, a time after) for which the probability is counted exactly; with more pairs,
the normal distribution is close enough."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison of times before and after a change, in the unit of the times.

    shift: Hodges-Lehmann estimate of the difference, positive if the times after the change are longer. score: standard
    score of the Mann-Whitney test, with the same sign. chance: probability that chance alone gives a score as far from
    0, in this direction.
    """

    median_before: float
    median_after: float
    shift: float
    score: float
    chance: float

    @property
    def shift_share(self) -> float:
        """The shift as a share of the median before the change."""
        return self.shift / max(self.median_before, 1e-9)

    def difference(self, least: float = 0.0, error_rate: float = ERROR_RATE) -> Difference:
        """Whether the change made things faster or slower: by more than `least` (in the unit of the times), and with a
        probability of at most `error_rate` by chance alone."""
        if abs(self.shift) <= least or self.chance > error_rate:
            return "no clear difference"
        return "slower" if self.shift > 0 else "faster"


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compares times before and after a change; both sides need at least one. Equal times count half for each side."""
    differences = [new - old for old in before for new in after]
    pairs, values = len(differences), len(before) + len(after)
    longer = sum((d > 0) + 0.5 * (d == 0) for d in differences)
    score = (longer - pairs / 2) / math.sqrt(pairs * (values + 1) / 12)
    if pairs <= EXACT_PAIRS:
        equal = tuple(count for _, count in sorted(Counter([*before, *after]).items()))
        orders = _orders(equal, len(before))
        fewer = sum(n for twice, n in orders.items() if twice <= 2 * longer)
        more = sum(n for twice, n in orders.items() if twice >= 2 * longer)
        as_far = more if score > 0 else fewer if score < 0 else max(fewer, more)
        chance = as_far / math.comb(values, len(before))
    else:
        chance = NormalDist().cdf(-abs(score))
    return Comparison(median(before), median(after), median(differences), score, chance)


@lru_cache(maxsize=64)
def _orders(equal: tuple[int, ...], before: int) -> dict[int, int]:
    """Exact distribution for the rank test: the number of ways to divide the times into those before and those after
    the change, for each value of the test statistic.

    A key is twice the statistic, so that it is an integer. The statistic is the number of pairs (a time before, a time
    after) in which the time after is longer; a pair of equal times counts half.

    equal: how often each different time occurs, from the shortest time on. before: number of times before the change.
    """
    ways = {(0, 0): 1}
    for count in equal:
        longer: Counter[tuple[int, int]] = Counter()
        for (chosen, twice), n in ways.items():
            for more in range(min(count, before - chosen) + 1):
                longer[chosen + more, twice + (count - more) * (2 * chosen + more)] += n * math.comb(count, more)
        ways = longer
    return {twice: n for (chosen, twice), n in ways.items() if chosen == before}
