"""Times before and after a change: the size of the difference, and when it is more than chance."""

from __future__ import annotations

import random
from itertools import combinations
from math import ceil, comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.comparison import EXACT_PAIRS, compare

SECONDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=30)


@given(SECONDS, SECONDS)
def test_exchanging_the_sides_turns_the_sign(one: list[float], other: list[float]) -> None:
    there, back = compare(one, other), compare(other, one)
    assert (there.score, there.shift) == (pytest.approx(-back.score, abs=1e-9), pytest.approx(-back.shift, abs=1e-9))
    assert there.chance == pytest.approx(back.chance)
    assert (compare(one, one).score, compare(one, one).shift) == (0, pytest.approx(0, abs=1e-9))


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_of_few_values_chance_is_counted(before: int, after: int, chance: random.Random) -> None:
    """Every order of the values is as likely as any other: those with a score as far from 0 are counted one by one."""
    values = list(range(before + after))
    chance.shuffle(values)
    found = compare(values[:before], values[before:])

    def longer(old: tuple[int, ...]) -> int:
        return sum(value > other for other in old for value in range(before + after) if value not in old)

    seen = longer(tuple(values[:before]))
    most = min(seen, before * after - seen)
    orders = sum(longer(old) <= most for old in combinations(range(before + after), before))
    assert found.chance == pytest.approx(orders / comb(before + after, before))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_of_equal_values_chance_is_counted_too(values: list[int], data: st.DataObject) -> None:
    """Each way to choose the values before is as likely as any other."""
    before = data.draw(st.integers(1, len(values) - 1))
    found = compare(values[:before], values[before:])

    def longer(old: tuple[int, ...]) -> float:
        new = [value for i, value in enumerate(values) if i not in old]
        return sum((value > values[i]) + 0.5 * (value == values[i]) for i in old for value in new)

    seen = longer(tuple(range(before)))
    chosen = [longer(old) for old in combinations(range(len(values)), before)]
    more, fewer = (sum(far) / len(chosen) for far in ([c >= seen for c in chosen], [c <= seen for c in chosen]))
    expected = more if found.score > 0 else fewer if found.score < 0 else max(more, fewer)
    assert found.chance == pytest.approx(expected)


@pytest.mark.parametrize("values", [9, 12, 20])
def test_of_many_values_chance_is_near_what_is_counted(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values**2 > EXACT_PAIRS
    made = random.Random(values)
    for middle in (1.0, 1.1, 1.3):
        before, after = ([made.gauss(mean, 0.3) for _ in range(values)] for mean in (1.0, middle))
        normal = compare(before, after).chance
        with monkeypatch.context() as patch:
            patch.setattr("tidegate.comparison.EXACT_PAIRS", values**2)
            assert normal == pytest.approx(compare(before, after).chance, abs=0.02)


FEW, MANY = [1.0, 1.1, 1.2], [1 + 0.01 * n for n in range(20)]


@pytest.mark.parametrize(
    ("before", "after", "least", "error_rate", "expected"),
    [
        (FEW, [0.9, 0.8, 0.7], 0.0, 1 / 20, "faster"),
        (FEW, [1.3, 1.4, 1.5], 0.0, 1 / 20, "slower"),
        (FEW, [0.9, 0.8, 0.7], 0.0, 0.01, "no clear difference"),
        (FEW, [0.9, 0.8, 1.0], 0.0, 1 / 20, "no clear difference"),
        (FEW, [0.9, 0.8, 0.7], 0.5, 1 / 20, "no clear difference"),
        ([1.0] * 5, [0.6] * 5 + [1.1], 0.015, 1 / 20, "faster"),
        ([1.0] * 5, [0.6] * 4 + [1.1] * 2, 0.015, 1 / 20, "no clear difference"),
        (MANY, [value * 0.8 for value in MANY], 0.05, 0.01, "faster"),
        (MANY, [value * 1.3 for value in MANY], 0.05, 0.01, "slower"),
        (MANY, MANY, 0.0, 0.01, "no clear difference"),
        ([1.0], [2.0] * 20, 0.0, 0.01, "no clear difference"),
    ],
)
def test_what_is_clear(before: list[float], after: list[float], least: float, error_rate: float, expected: str) -> None:
    assert compare(before, after).difference(least, error_rate) == expected


@pytest.mark.parametrize(("before", "after", "error_rate"), [(5, 3, 1 / 20), (5, 6, 1 / 20), (20, 20, 0.01)])
def test_chance_alone_is_seldom_clear(before: int, after: int, error_rate: float) -> None:
    made = random.Random(before * after)
    drawn = [compare(*([made.random() for _ in range(count)] for count in (before, after))) for _ in range(1000)]
    for word in ("faster", "slower"):
        found = sum(one.difference(error_rate=error_rate) == word for one in drawn)
        assert found <= ceil(1000 * error_rate) + 15, word


def test_outliers_hardly_move_the_shift() -> None:
    found = compare([2.0] * 20, [1.0] * 18 + [60.0] * 2)
    assert (found.shift, found.shift_share, found.median_before, found.median_after) == (-1.0, -0.5, 2.0, 1.0)
