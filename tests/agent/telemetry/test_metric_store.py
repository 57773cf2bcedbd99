"""The meter: counters never go back, whatever is told when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.telemetry.metric_store import MetricStore

BYTES = "tidegate_path_bytes_total"
LANE = ("nvme", "read", "update")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_what_is_shown_never_goes_back_and_ends_at_the_truth(steps: list[tuple[int, int]]) -> None:
    """Each step: some is ahead, then some of it is told, and at that moment nothing is ahead."""
    meter, before, truth = MetricStore(), 0.0, 0
    for ahead, told in steps:
        meter.set_pending(BYTES, {LANE: ahead})
        assert meter.rows_with_pending(BYTES)[LANE] >= max(before, truth + ahead)
        before = meter.rows_with_pending(BYTES)[LANE]
        meter.add(BYTES, told, *LANE)
        truth += told
        meter.set_pending(BYTES, {})
        assert meter.rows_with_pending(BYTES)[LANE] >= before
        before = meter.rows_with_pending(BYTES)[LANE]
    meter.add(BYTES, 1000, *LANE)
    meter.set_pending(BYTES, {})
    assert meter.rows_with_pending(BYTES)[LANE] == max(before, truth + 1000)


def test_a_gauge_loses_the_series_that_are_no_longer_so() -> None:
    meter = MetricStore()
    meter.set_series("tidegate_knob", {("stride", "desired"): 1.0, ("stride", "effective"): 1.0})
    meter.set_series("tidegate_knob", {("stride", "effective"): 0.5})
    assert meter.rows_with_pending("tidegate_knob") == {("stride", "effective"): 0.5}
    meter.set_value("tidegate_loss", 1.0)
    meter.set_value("tidegate_loss", None)
    assert meter.rows_with_pending("tidegate_loss") == {}


def test_observations_fall_into_buckets_and_the_newest_is_the_example() -> None:
    meter = MetricStore()
    for step, seconds in enumerate((0.3, 0.5, 0.4, 1000.0), start=1):
        meter.observe("tidegate_phase_seconds", seconds, "update", step=step, timestamp=float(step))
    found = meter.histograms("tidegate_phase_seconds")["update",]
    assert sum(found.counts) == 4
    assert found.counts[found.bounds.index(0.5)] == 3
    assert found.counts[-1] == 1
    assert found.total == pytest.approx(1001.2)
    assert {e.step for e in found.exemplars.values()} == {3, 4}


@pytest.mark.parametrize("call", ["add", "set_series", "set_pending", "observe"])
def test_a_family_that_the_catalogue_does_not_have_is_a_mistake(call: str) -> None:
    meter = MetricStore()
    with pytest.raises(KeyError):
        getattr(meter, call)("tidegate_typo_total", 1.0 if call in ("add", "observe") else {})


def test_phases_so_far_never_overlap_not_even_at_a_boundary() -> None:
    """Asked for at the moment at which the clock asks for the peak: the span that ends is noted, the next not begun."""
    found = []

    def peak() -> int:
        found.append(clock.so_far())
        return 0

    clock = PhaseRecorder(peak)
    for phase in ("forward", "backward", "update"):
        clock.enter(phase)
    for phases in (*found, clock.so_far()):
        for one, following in itertools.pairwise(phases):
            assert one.end <= following.start
    assert len(found) >= 2
