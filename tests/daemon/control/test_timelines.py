"""Which timelines of a rank are kept."""

from __future__ import annotations

from tidegate.daemon.control.timelines import KEEP_SECONDS, TIMELINES_KEPT, Timelines
from tidegate.wire.timeline import TimelineView


def view(step: int) -> TimelineView:
    return TimelineView(step=step, source="measured", origin=0.0, phases=(), spans=(), num_spans=0)


def test_one_in_a_few_seconds_is_kept_and_the_oldest_go() -> None:
    now = 0.0
    kept = Timelines(clock=lambda: now)
    for step in range(1000):
        now = step * KEEP_SECONDS / 4
        kept.add(view(step))
    assert kept.steps == (*range(1000 - 4 * TIMELINES_KEPT, 1000, 4), 999)
    assert [kept.at(step) for step in kept.steps] == [view(step) for step in kept.steps]
    assert kept.at(0) is None
    kept.forget()
    assert (kept.steps, kept.newest) == ((), None)


def test_a_step_that_comes_again_replaces_the_one_before() -> None:
    now = 0.0
    kept = Timelines(clock=lambda: now)
    for step in (1, 2, 1):
        now += KEEP_SECONDS
        kept.add(view(step).model_copy(update={"origin": now}))
    assert kept.steps == (2, 1)
    again = kept.at(1)
    assert again is not None
    assert again.origin == now
