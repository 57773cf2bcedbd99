"""docs/results.md: it is what bench/results_page.py writes, it has all results and all scripts, and it says what misses
a bound."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.services import ROOT

BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))
try:
    from reporting.chart import WIDTH, Level, Point, Series, chart, legend_rows, linear, logarithmic
    from reporting.claims import CLAIMS, OVERHEAD
    from reporting.figures import PERCENT, RATIO, Bound, Figure, status, verdicts
    from reporting.gpu import Gpu
    from reporting.gpu import status as gpu_status
    from reporting.lines import Runs, Value, hardware, runs_of, value
    from reporting.page import ELSEWHERE, UNCOMMITTED, files, section
finally:
    sys.path.remove(str(BENCH))

PAGE = (ROOT / "docs" / "results.md").read_text()
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py"))


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return files(BENCH / "results")


def test_the_committed_page_and_plots_are_what_the_script_writes(written: dict[str, str]) -> None:
    plots = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "images" / "results").iterdir()}
    assert plots | {"docs/results.md"} == set(written)
    stale = [path for path, text in written.items() if (ROOT / path).read_bytes() != text.encode()]
    assert stale == [], "run python bench/results_page.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_on_the_page_and_in_the_readme(script: str) -> None:
    assert (f"## {script.removesuffix('.py')}\n" in PAGE) != (script in UNCOMMITTED)
    assert f"`bench/{script}`" in PAGE
    assert f"`{script}`" in (BENCH / "README.md").read_text()


def test_every_script_with_a_bound_for_its_lines_states_a_claim() -> None:
    for claim in CLAIMS:
        assert (ast.get_docstring(ast.parse((BENCH / claim.script).read_text())) or "").startswith("Claim:")
        assert claim.statement.endswith(".")


def test_every_result_is_on_the_page() -> None:
    names = [path.name for path in (BENCH / "results").iterdir()]
    assert [name for name in names if f"(../bench/results/{name}" not in PAGE] == []
    assert set(ELSEWHERE) <= set(names)


def test_every_plot_is_shown_and_is_valid(written: dict[str, str]) -> None:
    for path, text in written.items():
        if path.endswith(".svg"):
            assert f"]({path.removeprefix('docs/')})" in PAGE
            paper = ElementTree.fromstring(text)[0]
            assert (paper.get("fill"), paper.get("width")) == ("white", ElementTree.fromstring(text).get("width"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("amd-epyc-2-cores", "AMD EPYC, 2 cores"),
        ("emulated-intel-xeon-2-cores", "Intel Xeon, 2 cores"),
        ("nvidia-h200", "NVIDIA H200"),
    ],
)
def test_hardware_has_its_usual_name(name: str, expected: str) -> None:
    assert hardware(name) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"a": {"b": {"median": 2.0, "quartile_low": 1.0, "quartile_high": 3.0}}}, Value(2.0, 1.0, 3.0)),
        ({"a": {"b": {"median": 2.0, "least": 1.0, "most": 3.0}}}, Value(2.0, 1.0, 3.0)),
        ({"a": {"b": 2.0, "b_low": 1.0, "b_high": 3.0}}, Value(2.0, 1.0, 3.0)),
        ({"a": {"b": 2.0}}, Value(2.0)),
        ({"a": {"b": None}}, None),
        ({"a": None}, None),
        ({}, None),
    ],
)
def test_a_figure_and_its_spread_are_found(line: dict[str, object], expected: Value | None) -> None:
    assert value(line, "a.b") == expected


def runs(*figures: float | None) -> Runs:
    return Runs("here", Path("here.jsonl"), tuple({"figure": figure} for figure in figures))


FIGURE = Figure("share", "figure", PERCENT, Bound("below", 0.05), Bound("below", 0.01))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (runs(0.04, 0.005), "All 2 committed runs are within all bounds."),
        (runs(0.06, 0.005), "The newest run is within all bounds. 1 of 2 committed runs misses a bound."),
        (runs(0.005), "The newest run is within all bounds."),
        (runs(0.04), "The newest run is within all bounds. **“share” is 4.0 %: the goal is below 1.0 %.**"),
        (runs(None), "The newest run is within all bounds. “share” was not measured."),
    ],
)
def test_runs_within_the_bound_are_said_to_be(found: Runs, said: str) -> None:
    assert verdicts([FIGURE], [found]) == f"- here: {said}"


def test_a_newest_run_that_misses_its_bound_is_said_to() -> None:
    found = runs(0.005, 0.07)
    assert verdicts([FIGURE], [found]).startswith(
        "- here: The newest run misses 1 bound. **“share” is 7.0 %: the bound is below 5.0 %.** 1 of 2 committed runs"
    )
    assert FIGURE.cell(found.newest) == "**7.0 %, missed**"
    assert status([FIGURE], found) == "here: **misses 1 of 1 bounds**, **misses 1 of 1 goals**"


@pytest.mark.parametrize(
    ("side", "holds"),
    [("at least", [False, True, True]), ("above", [False, False, True]), ("at most", [True, True, False]),
     ("below", [True, False, False])],
)  # fmt: skip
def test_bounds_hold_on_their_side(side: str, holds: list[bool]) -> None:
    assert [Bound(side, 2.0).holds(figure) for figure in (1.0, 2.0, 3.0)] == holds  # type: ignore[arg-type]


def test_each_hardware_has_its_row(tmp_path: Path) -> None:
    line = {"device": "emulated", "overhead_ratio": 0.004, "step_seconds": {"median": 0.3}, "paired_ratio": None}
    for name, ratio in (("amd-epyc-2-cores", 0.004), ("nvidia-h200", 0.006)):
        device = "emulated" if "cores" in name else "cuda:0"
        line |= {"overhead_ratio": ratio, "device": device}
        (tmp_path / f"overhead-{name}.jsonl").write_text(json.dumps(line) + "\n")
    text = "\n".join(section(OVERHEAD, runs_of(tmp_path, "overhead", OVERHEAD.kind)))
    assert "| AMD EPYC, 2 cores | emulated GPU | 1 | 0.40 % | not measured | 0.30 s |" in text
    assert "| NVIDIA H200 | real: cuda:0 | 1 | **0.60 %, missed** | not measured | 0.30 s |" in text


def test_a_claim_without_lines_has_no_committed_result(tmp_path: Path) -> None:
    assert list(section(OVERHEAD, runs_of(tmp_path, "overhead", OVERHEAD.kind)))[-1] == "There is no committed result."


def test_axes_have_round_ticks_around_all_figures() -> None:
    assert linear("s", [0.13, 0.47]).ticks == tuple((tick, f"{tick:g}") for tick in (0.1, 0.2, 0.3, 0.4, 0.5))
    assert [text for _, text in linear("s", [7.0], zero=True).ticks] == ["0", "2", "4", "6", "8"]
    assert [text for _, text in logarithmic("s", [15.0, 90.0]).ticks] == ["10", "20", "50", "100"]
    assert logarithmic("s", [10.0, 1000.0]).share(100.0) == pytest.approx(0.5)


def test_a_legend_that_is_too_long_for_a_row_has_two() -> None:
    assert [[name for _, name in row] for row in legend_rows(["a" * 40, "b" * 40, "c"], 500)] == [
        ["a" * 40],
        ["b" * 40, "c"],
    ]


def test_all_words_of_a_chart_are_escaped_and_inside() -> None:
    points = (Point(1.0, 2.0, 1.0, 3.0), Point(2.0, 4.0))
    text = chart(linear("x < y", [1, 2]), linear("y & x", [1, 4]), [Series("a > b", points)], [Level("bound", 3.0)])
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"x < y", "y & x", "a > b", "bound"} <= set(words)
    for number in re.findall(r' (?:x|cx|x1|x2)="([\d.-]+)"', text):
        assert 0 <= float(number) <= WIDTH


def test_a_ratio_has_two_decimals_and_its_spread() -> None:
    assert RATIO.show(Value(1.234, 1.0, 1.5)) == "1.23 (1.00 to 1.50)"
    assert RATIO.show(None) == "not measured"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "within all bounds"),
        ({"parity": {"weights_unlike_the_oracle": 0}}, "within all bounds"),
        ({"parity": {"weights_unlike_the_oracle": 1}}, "**misses 1 of 1 bounds**"),
        ({"watching": {"overhead_ratio": 0.008, "target": 0.005}}, "**misses 1 of 1 bounds**"),
        (
            {
                "parity": {"weights_unlike_the_oracle": 0},
                "watching": {"overhead_ratio": 0.004, "target": 0.005},
                "iterations-1b": {"speedup": {"zero3_cpu": {"iteration_seconds": 1.0}}},
            },
            "**misses 1 of 3 bounds**",
        ),
    ],
)
def test_bounds_of_a_gpu_count_where_they_were_measured(files: dict[str, object], said: str) -> None:
    assert gpu_status(Gpu(Path("gpu-nvidia-h200"), files)) == f"NVIDIA H200: {said}"
