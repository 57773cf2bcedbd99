"""What stays in host memory between steps."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tidegate.plan.effective_knobs import EffectiveKnobs, host_cached_ids

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(sizes=SIZES, budget=st.integers(0, 300), alternate=st.booleans())
def test_those_that_come_fit_beside_those_that_leave(sizes: list[int], budget: int, alternate: bool) -> None:
    """Within a step that runs backwards, subgroups come before others leave: both count against the cache."""
    effective = EffectiveKnobs("off", 0.0, host_cache_bytes=budget, alternate=alternate)
    movable = list(range(len(sizes)))
    after = [host_cached_ids(sizes, movable, effective, order) for order in ("ascending", "descending")]
    assert sum(sizes[i] for i in after[0] | after[1]) <= budget
    if not alternate:
        assert after[0] == after[1]
    for stay in after:
        left_out = [size for i, size in enumerate(sizes) if i not in stay]
        room = budget // (2 if alternate else 1)
        assert not left_out or sum(sizes[i] for i in stay) + max(left_out) > room, "no room is left unused"


def test_in_turns_the_next_step_begins_with_what_stayed() -> None:
    effective = EffectiveKnobs("off", 0.0, host_cache_bytes=40, alternate=True)
    assert host_cached_ids([10] * 6, range(6), effective, "ascending") == {4, 5}
    assert host_cached_ids([10] * 6, range(6), effective, "descending") == {0, 1}
