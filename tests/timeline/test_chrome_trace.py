"""Traces that Perfetto opens: rows, slices that do not overlap, arrows that begin and end inside slices."""

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate.plan import Placement, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import PathRates, RateCard
from tidegate.timeline.chrome_trace import SIMULATED_PID_OFFSET, chrome_trace, write_trace
from tidegate.timeline.stall_analysis import stalls
from tidegate.timeline.timeline import Timeline

RATES = RateCard(
    h2d_bytes_per_second=10e9,
    d2h_bytes_per_second=7e9,
    cpu_params_per_second=1e9,
    device_params_per_second=25e9,
    norm_params_per_second=100e9,
)
Event = dict[str, Any]


def timeline(step: int = 0) -> Timeline:
    subgroups = [Subgroup(i, 1_000_003, 2, 2, 10) for i in range(9)]
    plan = make_plan(subgroups, steady_placements(place_subgroups(9, stride=2, static_ratio=0.2)), num_slots=2)
    return simulate(plan, RATES, step_at=0.01, step=step)


def measured(step: int, origin: float) -> Timeline:
    return replace(timeline(step), source="measured", origin=origin)


def events(*timelines: Timeline, **wanted: object) -> list[Event]:
    trace = chrome_trace(timelines, rank=3, process_name="llama-7b rank 3")
    return [e for e in trace["traceEvents"] if all(e.get(key) == value for key, value in wanted.items())]


def test_rows() -> None:
    names = {e["tid"]: e["args"]["name"] for e in events(measured(0, 0.0), ph="M", name="thread_name")}
    assert list(names.values()) == ["phases", "stalls", "h2d", "d2h", "cpu", "device"]
    (process,) = events(measured(0, 0.0), ph="M", name="process_name")
    assert (process["pid"], process["args"]["name"]) == (3, "llama-7b rank 3")


def test_simulated_is_a_process_of_its_own() -> None:
    both = events(measured(0, 1e9), timeline(0), ph="M", name="process_name")
    assert {e["pid"]: e["args"]["name"] for e in both} == {
        3: "llama-7b rank 3",
        3 + SIMULATED_PID_OFFSET: "llama-7b rank 3 (simulated)",
    }


def test_slices_say_what_moved_and_how_fast() -> None:
    (fetch,) = events(measured(4, 0.0), name="state_h2d 1")
    assert fetch["args"] == {
        "step": 4,
        "op": fetch["args"]["op"],
        "subgroup": 1,
        "slot": 0,
        "bytes": 10_000_030,
        "content": "state",
        "GB/s": 10.0,
    }
    assert fetch["dur"] == pytest.approx(1000.003, abs=1e-3)
    (update,) = events(measured(4, 0.0), name="cpu_update 0")
    assert update["args"]["params"] == 1_000_003


def test_every_span_phase_and_stall_is_a_slice() -> None:
    one = measured(0, 0.0)
    assert len(events(one, ph="X")) == len(one.spans) + len(one.phases) + len(stalls(one))
    assert {e["name"] for e in events(one, ph="X", cat="phase")} == {"backward", "update"}
    assert len(stalls(one)) > 0


def test_slices_of_a_row_do_not_overlap() -> None:
    rows: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events(measured(0, 1e9), measured(1, 1e9 + 0.1), timeline(0), timeline(1), ph="X"):
        rows[event["pid"], event["tid"]].append(event)
    assert len(rows) == 12
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, two in itertools.pairwise(row):
            assert one["dur"] >= 0
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6


def test_arrows_begin_and_end_in_slices() -> None:
    one = measured(0, 5.0)
    starts, finishes = events(one, ph="s"), events(one, ph="f")
    assert len(starts) == len(finishes) == sum(len(deps) for deps in one.deps.values())
    assert {e["id"] for e in starts} == {e["id"] for e in finishes}
    slices = events(one, ph="X")
    for arrow in [*starts, *finishes]:
        row = [e for e in slices if e["tid"] == arrow["tid"] and e["pid"] == arrow["pid"]]
        assert any(e["ts"] <= arrow["ts"] < e["ts"] + e["dur"] for e in row)
    by_id = {e["id"]: e["ts"] for e in starts}
    assert all(by_id[e["id"]] <= e["ts"] and e["bp"] == "e" for e in finishes)


def first_ts(pid: int, step: int, *timelines: Timeline) -> float:
    return min(e["ts"] for e in events(*timelines, ph="X", pid=pid) if e["args"]["step"] == step)


def test_steps_are_placed_by_their_clock() -> None:
    shown = (measured(0, 1e9), measured(1, 1e9 + 2), timeline(1))
    assert first_ts(3, 0, *shown) == 0.0
    assert first_ts(3, 1, *shown) == 2e6
    assert first_ts(3 + SIMULATED_PID_OFFSET, 1, *shown) == 2e6


def test_simulated_steps_alone_follow_each_other() -> None:
    end = timeline(0).phases[-1].end
    assert first_ts(3 + SIMULATED_PID_OFFSET, 1, timeline(0), timeline(1)) == pytest.approx(end * 1e6, abs=1e-2)


@pytest.mark.parametrize("name", ["step.trace.json", "step.trace.json.gz"])
def test_files_are_plain_json(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, [measured(0, 0.0)], rank=0, process_name="demo")
    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert json.loads(raw) == chrome_trace([measured(0, 0.0)], rank=0, process_name="demo")


def test_nothing_to_show_is_still_a_trace() -> None:
    assert chrome_trace([], rank=0, process_name="demo")["traceEvents"] == []


def test_lanes_of_paths_come_after_the_others() -> None:
    paths = {name: PathRates(read_bytes_per_second=3e9, write_bytes_per_second=2e9) for name in ("pfs", "bb")}
    placements = [Placement("cpu", "pfs", "pfs", False), Placement("device", "bb", "bb", False)]
    plan = make_plan(
        [Subgroup(i, 1_000, 2, 2, 10) for i in range(2)], placements, num_slots=1, host_slots={"pfs": 1, "bb": 1}
    )
    tiered = simulate(plan, replace(RATES, paths=paths), step_at=0.01)
    rows = [e["args"]["name"] for e in events(tiered, ph="M", name="thread_name")]
    assert rows[2:] == ["h2d", "d2h", "cpu", "device", "bb:read", "bb:write", "pfs:read", "pfs:write"]
    (fetch,) = events(tiered, name="fetch 0")
    assert (fetch["args"]["content"], fetch["args"]["GB/s"]) == ("state", 3.0)
