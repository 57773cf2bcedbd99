"""One recorded run, told to the meter again: every family has its exact values, and none has them by accident."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache

import pytest

from tests.agent.telemetry.replay import Values, expected, recorded_steps, replay, values
from tests.timeline.compute import compute_seconds
from tidegate.agent.telemetry.metric_store import Labels, MetricStore
from tidegate.metrics.catalogue import BY_NAME, METRICS
from tidegate.metrics.family import Metric


class Deaf(MetricStore):
    """Does not hear of one family."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self._family_not_heard = family

    def add(self, name: str, amount: float, *labels: str) -> None:
        if name != self._family_not_heard:
            super().add(name, amount, *labels)

    def set_series(self, name: str, rows: Mapping[Labels, float]) -> None:
        if name != self._family_not_heard:
            super().set_series(name, rows)

    def observe(self, name: str, value: float, *labels: str, step: int | None = None, timestamp: float = 0.0) -> None:
        if name != self._family_not_heard:
            super().observe(name, value, *labels, step=step, timestamp=timestamp)

    def set_pending(self, name: str, rows: Mapping[Labels, float]) -> None:
        if name != self._family_not_heard:
            super().set_pending(name, rows)


@cache
def replayed() -> MetricStore:
    return replay(MetricStore())


def said(family: str) -> Values:
    return values(replayed(), BY_NAME[family])


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_its_values_are_those_of_the_run(metric: Metric) -> None:
    found = values(replayed(), metric)
    assert found == pytest.approx(expected()[metric.name], rel=1e-12)
    assert any(found.values()), "values that are zero say nothing"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_without_the_call_that_records_it_they_are_not(metric: Metric) -> None:
    silent = replay(Deaf(metric.name))
    assert values(silent, metric) != pytest.approx(expected()[metric.name], rel=1e-12)
    others = [other for other in METRICS if other is not metric]
    wrong = [m.name for m in others if values(silent, m) != pytest.approx(expected()[m.name], rel=1e-12)]
    assert wrong == [], "no other family depends on it"


# ---- the expected values, held against sums over what was recorded


def test_bytes_of_links_and_params_are_those_of_the_spans() -> None:
    moved: Counter[str] = Counter()
    updated: Counter[str] = Counter()
    for step in recorded_steps():
        for span in step.result.spans:
            if span.lane in ("h2d", "d2h"):
                moved[span.lane] += span.nbytes
            updated[str(span.kind)] += span.numel
    for direction, nbytes in moved.items():
        assert total("tidegate_link_bytes_total", f"direction={direction}") == nbytes
    assert total("tidegate_update_params_total", "processor=cpu") == updated["cpu_update"]
    assert total("tidegate_update_params_total", "processor=device") == updated["device_update"]


def test_bytes_of_paths_are_those_of_the_transfers_and_busy_time_has_the_open_read() -> None:
    nbytes: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for step in recorded_steps():
        for note in step.paths:
            for operation, moved in note.moves:
                nbytes[f"operation={operation},path={note.path}"] += moved.nbytes
                seconds[f"operation={operation},path={note.path}"] += moved.end - moved.start
    assert len(nbytes) == 4
    open_read = said("tidegate_path_open_seconds")["tidegate_path_open_seconds{operation=read,path=nvme}"]
    assert open_read > 2.0
    for lane in nbytes:
        counted, busy = total("tidegate_path_bytes_total", lane), total("tidegate_path_busy_seconds_total", lane)
        assert total("tidegate_path_operation_seconds", "sum{" + lane) == pytest.approx(seconds[lane])
        if lane == "operation=read,path=nvme":
            # A transfer of the step that was under way has ended, too.
            assert counted >= nbytes[lane]
            assert busy >= seconds[lane] + open_read
        else:
            assert counted >= nbytes[lane]
            assert busy >= seconds[lane] * (1 - 1e-9)


def test_phases_partition_the_steps_and_stalls_the_updates() -> None:
    steps = recorded_steps()
    wall = sum(step.phases.spans[-1].end - step.phases.spans[0].start for step in steps)
    assert total("tidegate_phase_seconds", "_sum{") == pytest.approx(wall)
    assert said("tidegate_phase_seconds")["tidegate_phase_seconds_count{phase=update}"] == len(steps)
    in_update = said_total_of_update_stalls()
    computed = sum(compute_seconds(step.monotonic_timeline) for step in steps)
    updates = total("tidegate_phase_seconds", "_sum{phase=update")
    assert in_update + computed == pytest.approx(updates, rel=0.01)


def said_total_of_update_stalls() -> float:
    return total("tidegate_stall_seconds_total", "phase=update")


def total(family: str, part: str) -> float:
    """Of the samples whose name and labels have `part` in them."""
    return sum(value for name, value in said(family).items() if _has(name, part))


def _has(name: str, part: str) -> bool:
    wanted = [piece for piece in part.replace("sum{", "sum{,").split(",") if piece]
    return all(piece in name for piece in wanted)
