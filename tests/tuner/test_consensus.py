"""What several ranks move to, as tables."""

from __future__ import annotations

import math

import pytest

from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.tuner.consensus import MAX_PROPOSALS, RankPredictions, Setting, elect, proposals

TWO, THREE = Setting(2.0, False, False), Setting(3.0, False, False)


@pytest.mark.parametrize(
    ("what", "judged", "expected"),
    [
        ("the slowest rank counts", [RankPredictions(1.0, (0.5, 0.8)), RankPredictions(1.0, (0.9, 0.8))], (THREE, 0.2)),
        ("…now, too", [RankPredictions(1.0, (0.5, 0.8)), RankPredictions(2.0, (0.9, 0.8))], (THREE, 0.6)),
        ("one has no room", [RankPredictions(1.0, (0.1, 0.8)), RankPredictions(1.0, (math.inf, 0.8))], (THREE, 0.2)),
        ("nothing is better", [RankPredictions(1.0, (1.0, 1.1)), RankPredictions(1.0, (1.0, 1.1))], None),
        ("better for some only", [RankPredictions(1.0, (0.5, 0.5)), RankPredictions(1.0, (1.2, 1.3))], None),
        ("none has room", [RankPredictions(1.0, (math.inf, 0.5)), RankPredictions(1.0, (0.5, math.inf))], None),
        (
            "one cannot tell: a probe",
            [RankPredictions(1.0, (None, math.inf)), RankPredictions(1.0, (0.5, 0.5))],
            (TWO, None),
        ),
        (
            "what is known comes first",
            [RankPredictions(1.0, (None, 0.9)), RankPredictions(1.0, (0.5, 0.9))],
            (THREE, 0.1),
        ),
        ("one does not know what it has", [RankPredictions(None, (0.5, 0.5)), RankPredictions(1.0, (0.5, 0.5))], None),
    ],
)
def test_elections(what: str, judged: list[RankPredictions], expected: tuple[Setting, float | None] | None) -> None:
    found = elect([TWO, THREE], judged)
    assert found == (None if expected is None else (expected[0], pytest.approx(expected[1])))
    turned = elect([THREE, TWO], [RankPredictions(one.now, one.then[::-1]) for one in judged])
    assert turned == found, "the order of proposals decides nothing"


def test_proposals_are_few_and_those_of_most_ranks() -> None:
    said = [None, *(Setting(float(n), False, False) for n in range(1, 9)), THREE, THREE, TWO]
    assert proposals(said)[:2] == [THREE, TWO]
    assert len(proposals(said)) == MAX_PROPOSALS
    assert proposals([None, None]) == []


def test_a_setting_means_the_same_on_ranks_with_other_caches() -> None:
    here, there = EffectiveKnobs(2.0, 0.1, None, 100, False), EffectiveKnobs(2.0, 0.1, None, 7_000, False)
    same = Setting.of(EffectiveKnobs(4.0, 0.1, None, 100, True), here)
    assert same.on(there, 9_000) == EffectiveKnobs(4.0, 0.1, None, 7_000, True)
    more = Setting.of(EffectiveKnobs(2.0, 0.1, None, 900, False), here)
    assert more.on(there, 9_000).host_cache_bytes == 9_000
    assert more.on(there, 10).host_cache_bytes == 7_000, "never less"
