"""What the bench of predictions says of its rows. Its figures need a machine and minutes; this is its arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from predicting import choices, errors, scatter  # type: ignore[import-not-found]

    return choices, errors, scatter


def test_configurations_are_drawn_alike_differ_and_take_turns(bench: tuple[ModuleType, ...]) -> None:
    choices = bench[0]
    kinds = [choices.Kind(paths=paths, subgroup_numel=n) for paths in ((), ("a",), ("a", "b")) for n in (1, 2)]
    drawn = choices.draw(kinds, 1000, 54, seed=3)
    assert drawn == choices.draw(kinds, 1000, 54, seed=3)
    assert drawn != choices.draw(kinds, 1000, 54, seed=4)
    assert [len(group) for group in choices.by_kind(drawn).values()] == [9] * 6
    assert len({str(choice.to_dict()) for choice in drawn}) == 54


def test_errors_are_of_what_was_measured(bench: tuple[ModuleType, ...]) -> None:
    choices, errors, scatter = bench
    drawn = choices.draw([choices.Kind(paths=(), subgroup_numel=1)], 0, 3, seed=0)
    figures = zip(drawn, (1.0, 1.1, 4.0), (1.2, 1.1, 3.0), (2.0, 9.0, 1.0), strict=True)
    rows = [
        errors.Row(
            choice=choice, measured=measured, low=measured, high=measured, predicted=predicted, equation=equation,
            bottleneck="cpu", emulated=False,
        )
        for choice, measured, predicted, equation in figures
    ]  # fmt: skip
    found = errors.summary(rows)
    assert found["median_abs_error"] == 0.2
    assert found["p95_abs_error"] == pytest.approx(0.245)
    assert found["pick_regret"] == pytest.approx(0.1), "it takes the second for the best"
    assert found["equation_pick_regret"] == pytest.approx(3.0)
    assert found["mean_median_abs_error"] == pytest.approx(abs(6.1 / 3 / 1.1 - 1), abs=1e-4)
    assert errors.summary(rows[:1])["median_abs_error"] is None
    drawing = ElementTree.fromstring(scatter.svg(rows))
    titles = [title.text or "" for title in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.rpartition(" ")[2] for title in titles] == ["+20.0%", "+0.0%", "-25.0%"]
