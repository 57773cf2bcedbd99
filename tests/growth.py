"""How processor time grows with the size of what is computed: a bound on it holds on a slow and on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(call: Callable[[int], object], small: int, large: int) -> float:
    """Processor time of `call(large)` divided by that of `call(small)`. Each is called three times, in turns, and its
    least time counts."""
    seconds: dict[int, list[float]] = {small: [], large: []}
    for size in (small, large) * 3:
        start = time.process_time()
        call(size)
        seconds[size].append(time.process_time() - start)
    return min(seconds[large]) / min(seconds[small])
