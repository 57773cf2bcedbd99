"""Where the time went: gaps and their causes in tables, sums that always come out."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.processor_time import processor_seconds
from tests.timeline.compute import compute_seconds
from tidegate.kernels.arithmetic import stall_analysis
from tidegate.kernels.arithmetic.span_sums import SpanTable
from tidegate.plan import OpKind, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.plan.ops import path_lanes
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import PathRates, RateCard
from tidegate.timeline.stall_analysis import (
    busy_seconds,
    causes_of_wait,
    common_seconds,
    critical_path,
    exposed_waits,
    split_by_phase,
    stalls,
)
from tidegate.timeline.timeline import STALL_CAUSES, Phase, PhaseSpan, Span, Timeline

KIND = {
    "h2d": OpKind.STATE_H2D,
    "d2h": OpKind.STATE_D2H,
    "cpu": OpKind.CPU_UPDATE,
    "device": OpKind.DEVICE_UPDATE,
}
Row = tuple[int, str, float, float]
"""Op, lane, start, end."""


def timeline(
    rows: list[Row], window: tuple[float, float] | None = (0.0, 10.0), deps: dict[int, tuple[int, ...]] | None = None
) -> Timeline:
    spans = tuple(Span(op, KIND[lane], lane, op, start, end, nbytes=1, numel=0) for op, lane, start, end in rows)
    phases = (PhaseSpan("update", *window),) if window else ()
    return Timeline(0, "measured", spans, phases, deps or {})


@pytest.mark.parametrize(
    ("what", "rows", "deps", "expected"),
    [
        ("nothing ran", [], {}, [("dispatch", 0, 10)]),
        ("always computing", [(0, "cpu", 0, 6), (1, "device", 5, 10)], {}, []),
        ("a gate opened late", [(0, "cpu", 3, 10)], {}, [("dispatch", 0, 3)]),
        ("state came late", [(0, "h2d", 0, 4), (1, "device", 4, 10)], {1: (0,)}, [("h2d", 0, 4)]),
        ("…and the agent too", [(0, "h2d", 1, 4), (1, "device", 5, 10)], {1: (0,)}, [
            ("dispatch", 0, 1),
            ("h2d", 1, 4),
            ("dispatch", 4, 5),
        ]),
        ("a chain through both links", [(0, "d2h", 0, 2), (1, "h2d", 2, 5), (2, "device", 5, 10)], {1: (0,), 2: (1,)}, [
            ("d2h", 0, 2),
            ("h2d", 2, 5),
        ]),
        ("a chain through a lane's order", [(0, "h2d", 0, 2), (1, "h2d", 2, 5), (2, "device", 5, 10)], {2: (1,)}, [
            ("h2d", 0, 5),
        ]),
        ("the blocker that ends last counts", [(0, "h2d", 0, 2), (1, "d2h", 0, 4), (2, "cpu", 4, 10)], {2: (0, 1)}, [
            ("d2h", 0, 4),
        ]),
        ("the other link was busy for nothing", [(0, "h2d", 0, 4), (1, "cpu", 4, 10)], {}, [("dispatch", 0, 4)]),
        ("between two updates", [(0, "device", 0, 3), (1, "d2h", 3, 6), (2, "device", 6, 10)], {1: (0,), 2: (1,)}, [
            ("d2h", 3, 6),
        ]),
        ("the tail is the last span's", [(0, "device", 0, 6), (1, "d2h", 6, 9)], {1: (0,)}, [
            ("d2h", 6, 9),
            ("dispatch", 9, 10),
        ]),
        ("a span may outlive the update", [(0, "device", 0, 6), (1, "d2h", 6, 12)], {1: (0,)}, [("d2h", 6, 10)]),
        ("a copy repeated: the last run counts", [(0, "d2h", 0, 1), (0, "d2h", 2, 4), (1, "cpu", 4, 10)], {1: (0,)}, [
            ("d2h", 0, 1),
            ("dispatch", 1, 2),
            ("d2h", 2, 4),
        ]),
        ("what began before the update is cut", [(0, "h2d", -5, 2), (1, "device", 2, 10)], {1: (0,)}, [("h2d", 0, 2)]),
        ("clocks that disagree", [(0, "h2d", 0, 5), (1, "device", 4, 10)], {1: (0,)}, [("h2d", 0, 4)]),
    ],
)  # fmt: skip
def test_stalls(what: str, rows: list[Row], deps: dict[int, tuple[int, ...]], expected: list[Row]) -> None:
    found = stalls(timeline(rows, deps=deps))
    assert [(stall.cause, stall.start, stall.end) for stall in found] == expected


@pytest.mark.parametrize(
    ("rows", "deps", "wait", "expected"),
    [
        ([], {}, (2, 5), {"dispatch": 3}),
        ([(0, "d2h", 0, 2)], {}, (2, 5), {"dispatch": 3}),
        ([(0, "d2h", 0, 4), (1, "d2h", 4, 5)], {}, (2, 5), {"d2h": 3}),
        ([(0, "cpu", 0, 3), (1, "d2h", 3, 5)], {1: (0,)}, (2, 6), {"cpu": 1, "d2h": 2, "dispatch": 1}),
        ([(0, "h2d", 0, 4), (1, "d2h", 0, 5)], {}, (2, 5), {"d2h": 3}),
    ],
)
def test_waits_for_the_end_of_an_update(
    rows: list[Row], deps: dict[int, tuple[int, ...]], wait: tuple[float, float], expected: dict[str, float]
) -> None:
    spans = timeline(rows).spans
    assert causes_of_wait(PhaseSpan("backward", *wait), spans, deps) == pytest.approx(expected)


def test_without_an_update_there_is_nothing_to_tell() -> None:
    empty = timeline([], window=None)
    assert stalls(empty) == ()
    assert exposed_waits(empty) == {}
    assert compute_seconds(empty) == 0.0
    assert critical_path(empty) == ()


# Sixty-fourths add up without rounding, so that sums can be compared exactly.
instant = st.integers(-200, 900).map(lambda n: n / 64)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Anything goes: overlaps within a lane, repeats, dependencies on what ran later, clocks that disagree."""
    rows = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(KIND)), instant, instant), max_size=14))
    spans = [(op, lane, min(a, b), max(a, b)) for op, lane, a, b in rows]
    ids = st.integers(0, 10)
    deps = draw(st.dictionaries(ids, st.lists(ids, max_size=3).map(tuple), max_size=10))
    low, high = sorted((draw(instant), draw(instant)))
    return timeline(spans, (low, high), deps)


@settings(max_examples=examples(400))
@given(timeline=timelines())
def test_stalls_and_compute_are_the_update(timeline: Timeline) -> None:
    low, high = timeline.window("update") or (0.0, 0.0)
    found = stalls(timeline)
    assert sum(stall.end - stall.start for stall in found) + compute_seconds(timeline) == high - low
    assert sum(exposed_waits(timeline).values()) + compute_seconds(timeline) == high - low
    assert all(low <= stall.start < stall.end <= high for stall in found)
    for one, two in itertools.pairwise(found):
        assert one.end < two.start or (one.end == two.start and one.cause != two.cause)
    assert {stall.cause for stall in found} <= set(STALL_CAUSES) - {"cpu", "device"}


@settings(max_examples=examples(600))
@given(timeline=timelines())
def test_the_native_sums_are_the_same_to_the_last_bit(timeline: Timeline) -> None:
    found = stall_analysis.exposed_waits(SpanTable(timeline.spans), timeline.deps, timeline.window("update"))
    assert found == exposed_waits(timeline)


def test_the_native_sums_without_an_update_are_empty() -> None:
    assert stall_analysis.exposed_waits(SpanTable(timeline([(0, "cpu", 0, 1)]).spans), {}, None) == {}


RATES = RateCard(
    h2d_bytes_per_second=10.0,
    d2h_bytes_per_second=7.0,
    cpu_params_per_second=2.0,
    device_params_per_second=25.0,
    norm_params_per_second=100.0,
)


def simulated(count: int, stride: float, static_ratio: float = 0.0, step_at: float = 5.0) -> Timeline:
    subgroups = [Subgroup(i, 1 + i % 3, 2, 2, 10) for i in range(count)]
    plan = make_plan(
        subgroups, steady_placements(place_subgroups(count, stride=stride, static_ratio=static_ratio)), num_slots=2
    )
    return simulate(plan, RATES, step_at=step_at)


@settings(max_examples=examples(100))
@given(count=st.integers(1, 20), stride=st.floats(1, 5), ratio=st.floats(0, 1), step_at=st.floats(0, 100))
def test_simulated_steps_add_up(count: int, stride: float, ratio: float, step_at: float) -> None:
    found = simulated(count, stride, ratio, step_at)
    low, high = found.window("update") or (0.0, 0.0)
    assert sum(exposed_waits(found).values()) + compute_seconds(found) == pytest.approx(high - low, abs=1e-9)


@settings(max_examples=examples(100))
@given(count=st.integers(1, 20), stride=st.floats(1, 5), ratio=st.floats(0, 1))
def test_the_critical_path_has_no_hole_after_its_gate(count: int, stride: float, ratio: float) -> None:
    """With gates that are open from the start, the path reaches from 0 to the end without a pause."""
    found = simulated(count, stride, ratio, step_at=0.0)
    path = [next(span for span in found.spans if span.op == op) for op in critical_path(found)]
    assert path[0].start == 0.0
    assert path[-1].end == max(span.end for span in found.spans)
    assert all(one.end == two.start for one, two in itertools.pairwise(path))


def test_critical_path_of_a_table() -> None:
    rows: list[Row] = [(0, "h2d", 0, 2), (1, "cpu", 0, 7), (2, "device", 2, 3), (3, "h2d", 7, 8), (4, "d2h", 3, 5)]
    assert critical_path(timeline(rows, deps={2: (0,), 3: (1,), 4: (2,)})) == (1, 3)


def test_busy_counts_overlaps_once() -> None:
    found = timeline([(0, "h2d", 0, 4), (1, "h2d", 3, 6), (2, "d2h", -2, 1), (3, "d2h", 8, 12)])
    assert busy_seconds(found.spans) == 6 + 2 + 4
    assert busy_seconds([]) == 0.0
    assert common_seconds([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0), (4.5, 9.0)]) == 1 + 1 + 0.5
    assert common_seconds([(0.0, 2.0)], [(2.0, 3.0)]) == common_seconds([], [(2.0, 3.0)]) == 0.0
    assert busy_seconds(found.spans, (0.0, 10.0)) == 6 + 2


STEP = (PhaseSpan("forward", 0, 4), PhaseSpan("backward", 4, 10), PhaseSpan("update", 12, 16), PhaseSpan("forward", 16, 20))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (1, 2, {"forward": 1.0}),
        (3, 5, {"forward": 0.5, "backward": 0.5}),
        (8, 16, {"backward": 0.25, "other": 0.25, "update": 0.5}),
        (2, 18, {"forward": 0.25, "backward": 0.375, "other": 0.125, "update": 0.25}),
        (20, 30, {"other": 1.0}),
        (-4, 4, {"other": 0.5, "forward": 0.5}),
        (13, 13, {"update": 1.0}),
        (11, 11, {"other": 1.0}),
    ],
)
def test_split_by_phase(start: float, end: float, expected: dict[Phase, float]) -> None:
    assert split_by_phase(PhaseSpan("other", start, end), STEP) == expected


@given(start=st.floats(-5, 25), seconds=st.floats(0, 30))
def test_shares_of_phases_add_up(start: float, seconds: float) -> None:
    shares = split_by_phase(PhaseSpan("other", start, start + seconds), STEP)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(share > 0 for share in shares.values())


def test_3000_subgroups_are_analysed_in_seconds() -> None:
    found = {count: simulated(count, 2) for count in (300, 3000)}

    def analyse(count: int) -> None:
        stalls(found[count])
        critical_path(found[count])

    few, many = (processor_seconds(lambda count=count: analyse(count)) for count in found)
    assert many < 2.0
    assert many / few < 30, "10 if the time grew with the number of subgroups, 100 if with its square"


def storage(**slower: float) -> RateCard:
    """A server's lanes, and two paths whose speed is divided."""
    return RateCard(
        h2d_bytes_per_second=25e9,
        d2h_bytes_per_second=25e9,
        cpu_params_per_second=2e9,
        device_params_per_second=25e9,
        norm_params_per_second=500e9,
        paths={
            path: PathRates(
                read_bytes_per_second=6e9 / slower.get(path, 1), write_bytes_per_second=5e9 / slower.get(path, 1)
            )
            for path in ("nvme", "pfs")
        },
    )


def waits_with(rates: RateCard, stride: float | str, cached_every: int) -> tuple[dict[str, float], float]:
    """Stalls by cause, and seconds of the update, of one and the same plan on a machine with `rates`."""
    groups = [Subgroup(i, 100_000_000, 2, 2, 10) for i in range(48)]
    where = ["host" if i % cached_every == 0 else ("nvme", "pfs")[i // 2 % 2] for i in range(48)]
    processors = [processor for processor, _ in place_subgroups(48, stride=stride, static_ratio=0)]  # type: ignore[arg-type]
    plan = make_plan(
        groups,
        steady_placements(zip(processors, where, strict=True)),
        num_slots=3,
        host_slots={"nvme": 3, "pfs": 3},
        rates=storage(),
    )
    found = simulate(plan, rates, step_at=5.0)
    low, high = found.window("update") or (0.0, 0.0)
    return exposed_waits(found), high - low


@pytest.mark.parametrize("cached_every", [3, 100])
@pytest.mark.parametrize("factor", [1.5, 4, 20])
@pytest.mark.parametrize("slow", ["nvme", "pfs"])
def test_a_slower_path_raises_its_own_stall_cause_and_no_other(slow: str, factor: float, cached_every: int) -> None:
    before, seconds_before = waits_with(storage(), "off", cached_every)
    after, seconds_after = waits_with(storage(**{slow: factor}), "off", cached_every)
    rise = {cause: after.get(cause, 0.0) - before.get(cause, 0.0) for cause in {*before, *after}}
    raised = {cause for cause, seconds in rise.items() if seconds > 1e-6}
    assert f"{slow}:read" in raised
    assert raised <= {f"{slow}:read", f"{slow}:write"}
    # All that the update takes longer is said to be this path's.
    assert sum(rise[cause] for cause in raised) >= seconds_after - seconds_before - 1e-6


def test_copies_behind_a_late_fetch_are_told_apart_from_it() -> None:
    """On the device a fetch is followed by a copy: each that is no longer hidden is a stall of its own, but no more."""
    before, _ = waits_with(storage(), 1, 100)
    after, _ = waits_with(storage(nvme=20), 1, 100)
    assert after["nvme:read"] + after["nvme:write"] > before["nvme:read"] + 60
    assert after["h2d"] <= 48 * 1e9 / 25e9
    assert after.keys() <= {*path_lanes("nvme"), *path_lanes("pfs"), "h2d", "d2h"}


def test_a_path_is_blamed_for_what_waits_for_its_slot() -> None:
    rows: list[Row] = [(0, "nvme:write", 0, 4), (1, "nvme:read", 4, 6), (2, "cpu", 6, 10)]
    spans = tuple(Span(op, OpKind.CPU_UPDATE, lane, op, low, high, 1, 0) for op, lane, low, high in rows)
    found = stalls(Timeline(0, "measured", spans, (PhaseSpan("update", 0.0, 10.0),), {1: (0,), 2: (1,)}))
    assert [(stall.cause, stall.start, stall.end) for stall in found] == [("nvme:write", 0, 4), ("nvme:read", 4, 6)]


@pytest.mark.parametrize(("outlives", "expected"), [(OpKind.FLUSH, (0, 1)), (OpKind.WEIGHT_H2D, (0, 1, 2))])
def test_the_critical_path_has_no_deferred_flush(outlives: OpKind, expected: tuple[int, ...]) -> None:
    """Only flushes outlive an update that deferred them; another op shows that the update overlaps the forward."""
    spans = (
        Span(0, OpKind.FETCH, "nvme:read", 0, 0.0, 1.0, 8, 0),
        Span(1, OpKind.CPU_UPDATE, "cpu", 0, 1.0, 2.0, 0, 1),
        Span(2, outlives, "nvme:write" if outlives is OpKind.FLUSH else "h2d", 0, 2.0, 4.0, 8, 0),
    )
    phases = (PhaseSpan("update", 0.0, 2.5),)
    timeline = Timeline(0, "measured", spans, phases, {0: (), 1: (0,), 2: (1,)})
    assert critical_path(timeline) == expected
