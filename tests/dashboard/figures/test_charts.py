"""Figures, figures' words and the form's rules: pure functions, no screen, no daemon."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from tests.dashboard.scripted import RATES, SUBGROUPS, step_report, timeline
from tidegate import units
from tidegate.client.step_stats import pace, summarize, verdict
from tidegate.dashboard.data import knob_edits
from tidegate.dashboard.data.lane_stats import lane_use
from tidegate.dashboard.data.path_stats import PathUse
from tidegate.dashboard.figures import chart_style, charts, gantt, memory_chart
from tidegate.dashboard.style import palette
from tidegate.dashboard.widgets.gantt import expected
from tidegate.dashboard.widgets.resources import MIN_CEILING_BYTES, link_ceilings
from tidegate.dashboard.widgets.storage import speed
from tidegate.knobs.knobs import SPECS
from tidegate.plan.ops import LANE_OF, LANES, OpKind
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.timeline import PHASES, STALL_CAUSES
from tidegate.wire.base import Liveness
from tidegate.wire.knobs import GenerationView, KnobBound
from tidegate.wire.run import RankView, RunView
from tidegate.wire.step import StallRow, StepReport

STEPS = tuple(step_report(step, 1000.0 + 3.5 * step) for step in range(1, 61))
BOUNDS = {spec.name: KnobBound.of(spec) for spec in SPECS.values()}


def run_view(liveness: Liveness = "live", last_seen: float = 100.0) -> RunView:
    rank = RankView(
        rank=0, agent="a", host="h", pid=1, device_kind="cuda", metrics_address="", liveness=liveness,
        last_seen=last_seen, started_at=0.0, phase="update", step=60, applied_generation=0, effective={},
    )  # fmt: skip
    return RunView(
        run="r", liveness=liveness, device_kind="cuda", world_size=1, step=60, generation=0, started_at=0.0,
        last_seen=last_seen, ranks=(rank,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0 ms"), (0.0000031, "3 µs"), (0.00123, "1.23 ms"), (0.0456, "45.6 ms"), (0.99996, "1.00 s"),
        (1.234, "1.23 s"), (59.96, "60.0 s"), (125.0, "2 min 5 s"), (7800.0, "2 h 10 min"),
    ],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (48_000_000, "48.0 MB"), (14_530_000_000, "14.5 GB"), (1e12, "1.00 TB")],
)
def test_bytes(value: float, text: str) -> None:
    assert units.nbytes(value) == text


def test_shares_knobs_and_counts() -> None:
    assert [units.share(v) for v in (None, 0.0, 0.004, 0.12, 1.0)] == ["–", "0 %", "0.4 %", "12 %", "100 %"]
    assert [units.knob("stride", v) for v in (None, "auto", 3.0, 2.5)] == ["–", "auto", "3", "2.5"]
    assert [units.knob("host_cache", v) for v in ("auto", 0, 8 * 2**30)] == ["auto", "0", "8GiB"]
    assert [units.count(v) for v in (12, 4096, 1.1e9)] == ["12", "4.10 k", "1.10 G"]
    assert [units.change(v) for v in (0.123, -0.24, 0.0)] == ["+12 %", "\u221224 %", "+0 %"]


def test_every_phase_lane_kind_and_cause_has_one_colour_of_its_own() -> None:
    assert set(palette.PHASE) == set(PHASES)
    assert set(palette.LANE) == set(LANES)
    assert set(palette.KIND) == set(palette.KIND_NAME) == set(OpKind)
    assert set(palette.CAUSE) == set(STALL_CAUSES)
    for colours in (palette.PHASE, palette.LANE, palette.KIND, palette.CAUSE):
        assert len(set(colours.values())) == len(colours)


def test_lanes_causes_and_places_of_paths_have_a_colour_too() -> None:
    assert palette.lane("nvme:read") == palette.cause("nvme:read") == palette.residence("nvme") == palette.KIND["fetch"]
    assert palette.lane("nvme:write") == palette.KIND["flush"]
    assert (palette.lane("cpu"), palette.lane("new"), palette.cause("lock")) == (
        palette.LANE["cpu"], palette.GREY, palette.CAUSE["lock"],
    )  # fmt: skip


def test_the_digest_is_of_the_newest_steps() -> None:
    figures = summarize(STEPS)
    assert figures.steps == 20
    assert figures.pace == pytest.approx(3.5)
    assert figures.update_share == pytest.approx(1.46 / (0.61 + 1.34 + 1.46 + 0.04), rel=0.03)
    assert figures.stall_share == pytest.approx({"h2d": 0.31, "d2h": 0.06})
    assert summarize(()).pace is None
    assert pace(STEPS[:1]) == pytest.approx(sum(STEPS[0].phase_seconds.values()))


def test_pace_is_of_one_step_also_where_some_were_not_told() -> None:
    every_other = STEPS[::2]
    assert len(every_other) > 2
    assert pace(every_other) == pytest.approx(pace(STEPS))


def test_the_verdict_says_what_the_update_waits_for() -> None:
    assert verdict(run_view(), summarize(STEPS), 100.0) == (
        "The update took 1.47 s, 42% of the step; it waited 31% of it for h2d."
    )
    calm = tuple(step.model_copy(update={"stalls": ()}) for step in STEPS)
    assert verdict(run_view(), summarize(calm), 100.0) == (
        "The update took 1.47 s, 42% of the step; hardly anything held it up."
    )
    assert verdict(run_view(), summarize(()), 100.0) == "Waiting for the first step to finish."
    skipping = [step.model_copy(update={"skipped": True}) for step in STEPS[-12:]]
    assert verdict(run_view(), summarize([*STEPS, *skipping]), 100.0).startswith(
        "12 of the newest 20 steps were skipped"
    )
    assert verdict(run_view("lost"), summarize(STEPS), 142.0) == "Lost: no message from rank 0 for 42 s."
    assert verdict(run_view("stale"), summarize(STEPS), 105.0) == "Late: no message from rank 0 for 5.0 s."
    assert verdict(run_view("finished"), summarize(STEPS), 1.0).startswith(
        "Finished after 60 steps: the update took 1.47 s, 42% of the step"
    )


def test_the_gantt_has_every_op_of_the_update_on_its_lane() -> None:
    view = timeline(7)
    figure = go.Figure(gantt.gantt(view))
    names = figure.layout.yaxis.ticktext
    drawn = {(trace.name, names[round(at)]) for trace in figure.data for at in trace.y}
    in_update = {OpKind(s.kind) for s in view.spans if s.kind != "grad_d2h"}
    assert {(palette.KIND_NAME[kind], LANE_OF[kind]) for kind in in_update} <= drawn
    assert ("waits for h2d", gantt.WAITS) in drawn
    hatched = [trace for trace in figure.data if trace.name.startswith("waits")]
    assert all(trace.marker.pattern.shape == "/" for trace in hatched)
    assert sum(len(trace.y) for trace in figure.data if trace.name == "CPU update") == SUBGROUPS // 2
    state_in = next(trace for trace in figure.data if trace.name == "state in")
    assert "1.00 GB at 10.2 GB/s" in state_in.customdata[0]
    low, high = figure.layout.xaxis.range
    assert low == 0
    assert high == pytest.approx(max(s.end for s in view.spans if s.end) * 1e3 - 1950)


def test_the_whole_step_shows_early_gradients_too() -> None:
    view = timeline(7)
    assert "gradient out" not in {trace.name for trace in go.Figure(gantt.gantt(view)).data}
    assert "gradient out" in {trace.name for trace in go.Figure(gantt.gantt(view, "step")).data}


def test_the_prediction_is_below_in_each_lane_and_the_path_ends_with_the_update() -> None:
    view = timeline(7)
    quick = view.model_copy(
        update={
            "source": "simulated",
            "spans": tuple(row.model_copy(update={"end": (row.start + row.end) / 2}) for row in view.spans),
        }
    )
    figure = go.Figure(gantt.gantt(view, predicted=quick, ink="#123456"))
    path = next(trace for trace in figure.data if trace.name == "critical path")
    assert path.line.color == "#123456"
    last = max(view.spans, key=lambda row: row.end)
    assert path.x[-1] == pytest.approx((last.end - 1.95) * 1e3)
    measured = {trace.name: trace for trace in figure.data if trace.showlegend is not False and trace.type == "bar"}
    predicted = {trace.name: trace for trace in figure.data if trace.showlegend is False}
    for name in ("state in", "CPU update"):
        above, below = measured[name], predicted[name]
        assert above.marker.color == below.marker.color
        assert above.y[0] < below.y[0] < above.y[0] + 0.5, "the axis runs down"
        assert above.y[0] + above.width / 2 <= below.y[0] - below.width / 2, "they do not overlap"
        assert sum(below.x) == pytest.approx(sum(above.x) / 2)
        assert below.customdata[0].startswith("predicted: ")
    assert any("on the critical path" in words for words in measured["state in"].customdata)
    assert not any("critical" in trace.name for trace in go.Figure(gantt.gantt(view)).data)


@pytest.mark.parametrize(("share", "shown"), [(0.5, ">50 %, "), (1.0, ">100 %, "), (3.47, ">over 100 %, ")])
def test_a_path_faster_than_when_the_run_began_is_over_100_percent(share: float, shown: str) -> None:
    assert shown in speed(PathUse(bytes_per_step=1.0, bytes_per_second=1e9, ceiling_share=share), "nvme:read")


@pytest.mark.parametrize(("times", "shown"), [(1.5, 1.5), (100.0, gantt.MAX_PREDICTED_RATIO), (0.5, 1.0)])
def test_a_prediction_that_is_far_off_leaves_the_measured_update_readable(times: float, shown: float) -> None:
    view = timeline(7)
    first, last = gantt.window(view, "update")
    phases = tuple(
        row if row.phase != "update" else row.model_copy(update={"end": first + times * (last - first)})
        for row in view.phases
    )
    figure = gantt.gantt(view, predicted=view.model_copy(update={"phases": phases}))
    seconds = shown * (last - first)
    assert figure["layout"]["xaxis"]["range"][1] == pytest.approx(seconds * chart_style.time_scale(seconds)[0])


def test_lanes_with_a_prediction_are_compared() -> None:
    rates = RateCard.from_dict(RATES.model_dump())
    view = timeline(7)
    found = expected(view, rates)
    assert found is not None
    assert {row.lane for row in found.spans} == {row.lane for row in view.spans}
    assert expected(view, rates) is found, "the simulator is asked once"
    assert expected(view.model_copy(), rates) is not found
    assert expected(view, None) is None
    assert expected(view, replace(rates, cpu_params_per_second=None)) is None
    assert expected(view.model_copy(update={"num_spans": 5000}), rates) is None


def test_the_tide_has_a_wave_for_each_phase_in_its_place() -> None:
    waves = memory_chart.phase_peaks(STEPS[:2])
    assert [wave.phase for wave in waves] == 2 * ["forward", "backward", "update"]
    assert waves[0].at == 1.0
    assert waves[1].at == pytest.approx(1.0 + waves[0].width)
    assert waves[3].at == 2.0
    whole = STEPS[0].phase_seconds
    assert waves[0].width == pytest.approx(whole["forward"] / sum(whole.values()))
    figure = go.Figure(memory_chart.memory_figure(STEPS, 80_000_000_000))
    assert {trace.name for trace in figure.data} >= {"backward", "host state", "host mirror", "host gradient"}
    assert len(next(trace for trace in figure.data if trace.name == "backward").x) == memory_chart.STEPS
    assert figure.layout.yaxis2.autorange == "reversed"
    assert "80.0 GB in all" in figure.layout.annotations[-1].text
    none = [step.model_copy(update={"device_memory_peak_bytes": {}}) for step in STEPS]
    bare = go.Figure(memory_chart.memory_figure(none, 80_000_000_000))
    assert all(trace.name.startswith("host") for trace in bare.data)
    assert not bare.layout.shapes


def test_changes_of_knobs_are_marked_where_they_are_in_sight() -> None:
    marks = [charts.Mark(30, "1", ("stride = 3",)), charts.Mark(900, "2", ("stride = 4",))]
    figure = go.Figure(charts.phase_history(STEPS, marks))
    assert [shape.x0 for shape in figure.layout.shapes] == [29.5]
    assert figure.data[-1].customdata == ("stride = 3",)


def test_cores_are_cpu_seconds_by_seconds_of_the_phase() -> None:
    figure = go.Figure(charts.cpu_cores(STEPS))
    forward = next(trace for trace in figure.data if trace.name == "forward")
    assert forward.y[0] == pytest.approx(0.7 / 0.61, rel=1e-4)
    assert {trace.name for trace in figure.data} == {"forward", "backward", "update"}


def test_the_ceiling_of_the_link_is_its_fastest_phase() -> None:
    slow = STEPS[0].model_copy(
        update={"links": tuple(row.model_copy(update={"busy_seconds": 2 * row.busy_seconds}) for row in STEPS[0].links)}
    )
    assert link_ceilings([slow, STEPS[1]]) == link_ceilings(STEPS) == {"h2d": 7.2e9 / 0.35, "d2h": 5e9 / 0.25}
    few = STEPS[0].links[0].model_copy(update={"bytes": MIN_CEILING_BYTES - 1, "busy_seconds": 1e-9})
    assert link_ceilings([STEPS[0].model_copy(update={"links": (few,)})]) == {}


def test_thousands_of_ops_become_hundreds_of_bars_and_lose_no_byte() -> None:
    view = timeline(7)
    one = view.spans[0]
    many = [one.model_copy(update={"op": n, "start": n * 1e-3, "end": n * 1e-3 + 9e-4}) for n in range(4000)]
    joined = gantt.bars(many, finest=4.0 / gantt.MAX_BARS)
    assert len(joined) <= gantt.MAX_BARS
    assert sum(bar.nbytes for bar in joined) == sum(row.nbytes for row in many)
    assert all(a.end <= b.start for a, b in itertools.pairwise(joined))


def test_lane_use_counts_what_lies_inside_the_update() -> None:
    view = timeline(7)
    use = {row.lane: row for row in lane_use(view, *gantt.window(view, "update"))}
    assert use["h2d"].nbytes == 8 * 1000_000_000 + 8 * 200_000_000
    assert use["h2d"].busy_seconds == pytest.approx(8 * 0.098 + 8 * 0.011)
    assert use["cpu"].params_per_second == pytest.approx(100e6 / 0.092, rel=1e-6)
    assert all(0 < row.busy_share <= 1 for row in use.values())


@pytest.mark.parametrize("steps", [(), STEPS[:1], STEPS], ids=["none", "one", "many"])
def test_every_chart_can_be_drawn(steps: tuple[StepReport, ...]) -> None:
    figures = [
        charts.phase_history(steps),
        charts.stalls_by_cause(steps),
        charts.link_bytes(steps),
        charts.cpu_cores(steps),
        memory_chart.memory_figure(steps, 80_000_000_000),
        charts.series(([s.step for s in steps], [s.loss or 0.0 for s in steps]), "none", "#000000"),
    ]
    for figure in map(go.Figure, figures):
        assert figure.to_json()
        assert bool(figure.data) == bool(steps)
        assert bool(figure.layout.annotations) or steps, "an empty chart says why"


def test_no_stalls_is_good_news_and_not_an_empty_chart() -> None:
    calm = STEPS[0].model_copy(update={"stalls": (StallRow(phase="update", cause="h2d", seconds=0.0),)})
    assert "No stalls" in charts.stalls_by_cause((calm,))["layout"]["annotations"][0]["text"]


def test_the_outcome_of_a_refusal_has_its_figures() -> None:
    refused = GenerationView(
        run="r", generation=5, state="refused", knobs={}, changes={"static_ratio": 0.5}, author="ana", created_at=0.0,
        outcome="rank 0 needs 21.3 GB, 14.0 GB are free.",
    )  # fmt: skip
    good, sentence = knob_edits.outcome(refused)
    assert not good
    assert "21.3 GB, 14.0 GB" in sentence


def test_no_label_that_moves_with_the_steps_is_measured() -> None:
    """Plotly would remember its size at each place where it ever stood, and lay out the page for each."""
    figures = [
        charts.phase_history(STEPS), charts.stalls_by_cause(STEPS), charts.link_bytes(STEPS), charts.cpu_cores(STEPS),
        charts.series(([1, 2], [1.0, 2.0]), "", "#000000"), memory_chart.memory_figure(STEPS, 80_000_000_000),
        gantt.gantt(timeline(7)),
    ]  # fmt: skip
    for figure in figures:
        axes = {name: axis for name, axis in figure["layout"].items() if "axis" in name}
        assert len(axes) >= 2
        for axis in axes.values():
            assert "title" not in axis
            still = axis.get("type") == "category" or "ticktext" in axis
            if not still:
                assert (axis["automargin"], axis["tickangle"], axis["ticklabeloverflow"]) == (False, 0, "allow")
        template = chart_style.themed(figure, "dark")["layout"]["template"]["layout"]
        assert not {"title", "automargin"} & {*template["xaxis"], *template["yaxis"]}
        assert len(json.dumps(figure)) < 25_000, "small enough to send often"


def test_a_chart_keeps_what_it_says_under_either_theme() -> None:
    figure = charts.phase_history(STEPS)
    light, dark = (go.Figure(chart_style.themed(figure, theme)) for theme in ("light", "dark"))
    assert light.data == dark.data
    assert light.layout.template.layout.font.color != dark.layout.template.layout.font.color
    assert light.layout.height == dark.layout.height == chart_style.TALL
