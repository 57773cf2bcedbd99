"""The tier split: counts by three rules held against brute force, and which subgroup goes where."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.errors import CapacityError, ConfigError
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX, PairFactors
from tidegate.plan.tier_split import (
    PathSpeeds,
    assign_paths,
    balanced_split,
    eq1_split,
    makespan_seconds,
    user_split,
)


def rates(read: float, write: float, factors: PairFactors = HALF_DUPLEX) -> PathSpeeds:
    return PathSpeeds(read_bytes_per_second=read, write_bytes_per_second=write, factors=factors)


NAMES = ("nvme", "pfs", "s3", "tape")
FACTORS = st.sampled_from([HALF_DUPLEX, DUPLEX, (0.6, 0.8), (0.4, 0.3)])
SPEEDS = st.builds(rates, st.floats(0.1, 10), st.floats(0.1, 10), FACTORS)


@st.composite
def paths(draw: st.DrawFn) -> dict[str, PathSpeeds]:
    return {name: draw(SPEEDS) for name in NAMES[: draw(st.integers(1, 3))]}


def compositions(count: int, limits: list[int]) -> Iterator[tuple[int, ...]]:
    return (c for c in itertools.product(*(range(limit + 1) for limit in limits)) if sum(c) == count)


@pytest.mark.parametrize(
    ("count", "bandwidths", "expected"),
    [
        (9, {"nvme": 2.0, "pfs": 1.0}, {"nvme": 6, "pfs": 3}),
        (10, {"nvme": 2.0, "pfs": 1.0}, {"nvme": 7, "pfs": 3}),
        (1, {"nvme": 1.0, "pfs": 1.0}, {"nvme": 1, "pfs": 0}),
        (5, {"nvme": 1.0, "pfs": 1.0, "s3": 1.0}, {"nvme": 2, "pfs": 2, "s3": 1}),
        (100, {"nvme": 5.3, "pfs": 3.1}, {"nvme": 63, "pfs": 37}),
        (0, {"nvme": 5.3}, {"nvme": 0}),
    ],
)
def test_equation_1_by_hand(count: int, bandwidths: dict[str, float], expected: dict[str, int]) -> None:
    for faster in (1.0, 7.0):
        for read_is_slower in (True, False):
            made = {n: rates(b, b * faster) if read_is_slower else rates(b * faster, b) for n, b in bandwidths.items()}
            assert eq1_split(count, made) == expected, "only the slower direction counts"


@given(st.integers(0, 60), paths())
def test_equation_1_is_within_one_of_its_share(count: int, made: dict[str, PathSpeeds]) -> None:
    split = eq1_split(count, made)
    slower = {n: min(r.read_bytes_per_second, r.write_bytes_per_second) for n, r in made.items()}
    assert sum(split.values()) == count
    assert list(split) == list(made)
    for name, n in split.items():
        assert abs(n - count * slower[name] / sum(slower.values())) < 1 + 1e-9


def test_overflow_goes_to_the_others_by_the_same_rule() -> None:
    made = {"nvme": rates(6, 6), "pfs": rates(2, 2), "s3": rates(1, 1)}
    assert eq1_split(18, made) == {"nvme": 12, "pfs": 4, "s3": 2}
    assert eq1_split(18, made, capacity={"nvme": 9}) == {"nvme": 9, "pfs": 6, "s3": 3}
    assert eq1_split(18, made, capacity={"nvme": 9, "pfs": 5}) == {"nvme": 9, "pfs": 5, "s3": 4}, "what it frees, too"
    assert eq1_split(18, made, capacity={"nvme": 0, "pfs": 6}) == {"nvme": 0, "pfs": 6, "s3": 12}


@pytest.mark.parametrize("split", [eq1_split, balanced_split])
def test_what_does_not_fit_is_refused_with_figures(split) -> None:  # type: ignore[no-untyped-def]
    made = {"nvme": rates(2, 2), "pfs": rates(1, 1)}
    assert split(7, made, capacity={"nvme": 3, "pfs": 4}) == {"nvme": 3, "pfs": 4}
    with pytest.raises(CapacityError, match=r"8 subgroups .*: nvme takes 3, pfs takes 4, 7 in all\. .* raise") as error:
        split(8, made, capacity={"nvme": 3, "pfs": 4})
    assert (error.value.needed, error.value.available) == (8, 7)
    with pytest.raises(CapacityError, match="there is no path"):
        split(1, {})
    assert split(0, {}) == {}


def test_a_users_split() -> None:
    assert user_split(10, {"nvme": 2, "pfs": 1}) == {"nvme": 7, "pfs": 3}
    assert user_split(10, {"nvme": 0.5, "pfs": 0.25}) == {"nvme": 7, "pfs": 3}, "only the ratio counts"
    assert user_split(10, {"nvme": 1, "pfs": 0}) == {"nvme": 10, "pfs": 0}
    assert user_split(10, {"nvme": 2, "pfs": 1}, capacity={"nvme": 4}) == {"nvme": 4, "pfs": 6}
    with pytest.raises(CapacityError, match="nvme takes 4, pfs takes 0"):
        user_split(5, {"nvme": 1, "pfs": 0}, capacity={"nvme": 4})
    for wrong in ({"nvme": -1.0, "pfs": 2.0}, {"nvme": 0.0}, {}, {"nvme": float("nan")}, {"nvme": float("inf")}):
        with pytest.raises(ConfigError, match="at least one above 0"):
            user_split(3, wrong)


@given(paths(), st.integers(0, 9), st.data())
@settings(max_examples=examples(300))
def test_balanced_is_the_best_of_all_splits(made: dict[str, PathSpeeds], count: int, data: st.DataObject) -> None:
    """Held against every split that there is, capacities and a minimum included."""
    capacity = {name: data.draw(st.integers(0, 9)) for name in made if data.draw(st.booleans())}
    minimum = data.draw(st.integers(0, 2))
    limits = [min(count, capacity.get(name, count)) for name in made]
    if sum(limits) < count:
        with pytest.raises(CapacityError):
            balanced_split(count, made, capacity=capacity)
        return
    floors = [min(minimum, limit) for limit in limits]
    if sum(floors) > count:
        floors = [0] * len(limits)
    fair = [c for c in compositions(count, limits) if all(n >= low for n, low in zip(c, floors, strict=True))]
    best = min(makespan_seconds(dict(zip(made, c, strict=True)), made, 1) for c in fair)
    found = balanced_split(count, made, capacity=capacity, minimum=minimum)
    assert tuple(found.values()) in fair
    assert makespan_seconds(found, made, 1) == best


def test_where_reads_and_writes_differ_equation_1_loses() -> None:
    """Writes as slow, reads six times as fast: Eq. 1 sees no difference, and its makespan is 29 % longer."""
    made = {"nvme": rates(6, 1), "pfs": rates(1, 1)}
    assert eq1_split(19, made) == {"nvme": 10, "pfs": 9}
    assert balanced_split(19, made) == {"nvme": 12, "pfs": 7}
    assert makespan_seconds(eq1_split(19, made), made, 1) == pytest.approx(18.0)
    assert makespan_seconds(balanced_split(19, made), made, 1) == pytest.approx(14.0)


def test_duplex_halves_the_time_of_equal_ways() -> None:
    assert rates(2, 2).seconds_per_byte == 1.0
    assert rates(2, 2, DUPLEX).seconds_per_byte == 0.5
    assert balanced_split(9, {"a": rates(2, 2, DUPLEX), "b": rates(2, 2)}) == {"a": 6, "b": 3}
    assert makespan_seconds({"a": 6, "b": 3}, {"a": rates(2, 2, DUPLEX), "b": rates(2, 2)}, 10) == 30.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="calibrate the path again"):
        rates(1.0, rate)


# ---- which subgroup goes where

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda n: dict(zip(NAMES, n, strict=False)))


def discrepancy(assigned: dict[int, str], ids: list[int], counts: dict[str, int]) -> float:
    """The most that any first k ids have more or less of a path than its share."""
    seen: Counter[str] = Counter()
    worst = 0.0
    for k, i in enumerate(ids, start=1):
        seen[assigned[i]] += 1
        worst = max(worst, *(abs(seen[path] - k * n / len(ids)) for path, n in counts.items()))
    return worst


def moved(before: dict[int, str], after: dict[int, str]) -> int:
    return sum(before.get(i) != path for i, path in after.items())


def test_paths_take_turns() -> None:
    assert "".join(p[0] for p in assign_paths(range(6), {"nvme": 4, "pfs": 2}).values()) == "nnpnnp"
    assert "".join(p[0] for p in assign_paths(range(6), {"nvme": 3, "pfs": 3}).values()) == "npnpnp"


@given(COUNTS, st.randoms(use_true_random=False))
def test_from_scratch_paths_are_spread_evenly(counts: dict[str, int], random: random.Random) -> None:
    ids = random.sample(range(1000), sum(counts.values()))
    assigned = assign_paths(ids, counts)
    assert list(assigned) == ids
    assert Counter(assigned.values()) == Counter(counts)
    if ids:
        assert discrepancy(assigned, ids, counts) < 1


@given(COUNTS, st.data())
def test_as_few_move_as_can_be(counts: dict[str, int], data: st.DataObject) -> None:
    ids = list(range(sum(counts.values())))
    homes = st.sampled_from([*NAMES, "gone", None])
    current = {i: home for i in [*ids, -1, 999] if (home := data.draw(homes)) is not None}
    after = assign_paths(ids, counts, current)
    assert Counter(after.values()) == Counter(counts)
    held = Counter(current[i] for i in ids if i in current)
    assert moved(current, after) == len(ids) - sum(min(held[path], n) for path, n in counts.items())
    assert assign_paths(ids, counts, after) == after, "what is as wanted stays"
    assert after == assign_paths(ids, counts, dict(reversed(current.items())))


@pytest.mark.parametrize("seed", range(20))
def test_many_changes_leave_it_spread(seed: int) -> None:
    """A path is never far behind its share, however often the split was changed before."""
    random_ = random.Random(seed)
    ids = list(range(60))
    assigned = assign_paths(ids, {"nvme": 30, "pfs": 20, "s3": 10})
    for _ in range(40):
        cuts = sorted(random_.sample(range(1, 60), 2))
        counts = {"nvme": cuts[0], "pfs": cuts[1] - cuts[0], "s3": 60 - cuts[1]}
        assigned = assign_paths(ids, counts, assigned)
        assert discrepancy(assigned, ids, counts) < 3.5


def test_a_block_is_broken_up() -> None:
    after = assign_paths(range(12), {"nvme": 6, "pfs": 6}, dict.fromkeys(range(12), "nvme"))
    assert discrepancy(after, list(range(12)), {"nvme": 6, "pfs": 6}) < 1


def test_counts_must_match() -> None:
    with pytest.raises(ConfigError, match="counts of the paths add up to 3 subgroups, but there are 4"):
        assign_paths(range(4), {"nvme": 3})
