"""What the bench of predictions says of its rows. Its figures need a machine and minutes; this is its arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def test_an_emulated_device_leaves_a_processor_to_the_cpu_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its lanes together take less than one, each its share of what it does without a pace."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from predicting import emulation  # type: ignore[import-not-found]

    assert sum(emulation.SHARES.values()) < 1
    monkeypatch.setattr(emulation, "rate", lambda once, seconds: 8e9)
    found = emulation.affordable()
    assert found.h2d_bytes_per_second == 8e9 * emulation.SHARES["h2d"]
    assert found.d2h_bytes_per_second == 8e9 * emulation.SHARES["d2h"]
    assert found.update_params_per_second == 8e9 * emulation.SHARES["device"]


def test_steps_that_alternate_count_for_themselves_and_a_stall_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from predicting import training  # type: ignore[import-not-found]

    def step(seconds: float) -> object:
        return training.Measured(update_seconds=seconds, backward_seconds=0.0, busy_seconds={})

    turns = [(1.0, 3.0), (90.0, 3.0), (1.0, 80.0)]
    assert training.typical_seconds([[step(one) for one in turn] for turn in turns]) == 2.0


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
