"""Live speeds of paths: a change is followed within five steps, noise is not followed at all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import CapacityError
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX, PairFactors
from tidegate.plan.tier_split import PathSpeeds, SubgroupCounts, balanced_split, makespan_seconds, rebalanced
from tidegate.speeds.path_speed_estimator import PathSpeedEstimator, PathStepTotals, PathTraffic

SUBGROUP_BYTES = 1_000_000_000
COUNT = 70


def rates(read: float, write: float, factors: PairFactors = HALF_DUPLEX) -> PathSpeeds:
    return PathSpeeds(read_bytes_per_second=read * 1e9, write_bytes_per_second=write * 1e9, factors=factors)


PATHS = {"nvme": rates(6.0, 3.0), "pfs": rates(3.0, 3.0, DUPLEX), "s3": rates(1.0, 0.5)}


def traffic(
    counts: SubgroupCounts, truth: dict[str, PathSpeeds], noise: Callable[[], float] = lambda: 1.0
) -> dict[str, PathTraffic]:
    """A step in which a path reads all the time that it does not write, as a shared device would."""
    found = {}
    for name, n in counts.items():
        rate, nbytes = truth[name], n * SUBGROUP_BYTES
        read = nbytes / rate.read_bytes_per_second / noise()
        write = nbytes / rate.write_bytes_per_second / noise()
        both = min(read, write) if rate.factors == DUPLEX else 0.0
        found[name] = PathTraffic(
            read_bytes=nbytes, read_seconds=read, shared_read_seconds=both,
            write_bytes=nbytes, write_seconds=write, shared_write_seconds=both,
        )  # fmt: skip
    return found


def run(
    estimator: PathSpeedEstimator,
    counts: SubgroupCounts,
    truth: dict[str, PathSpeeds],
    steps: int,
    noise: Callable[[], float] = lambda: 1.0,
) -> tuple[SubgroupCounts, int]:
    """The counts after so many steps, and how often they changed."""
    moves = 0
    for _ in range(steps):
        estimator.observe(traffic(counts, truth, noise))
        if (better := rebalanced(counts, estimator.rates)) is not None:
            counts, moves = better, moves + 1
    return counts, moves


def slowed(name: str, factor: float) -> dict[str, PathSpeeds]:
    rate = PATHS[name]
    return PATHS | {
        name: PathSpeeds(
            read_bytes_per_second=rate.read_bytes_per_second / factor,
            write_bytes_per_second=rate.write_bytes_per_second / factor,
            factors=rate.factors,
        )
    }


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("noisy", [False, True])
def test_a_path_slowed_to_a_quarter_is_followed_within_five_steps_and_so_is_its_recovery(
    name: str, noisy: bool
) -> None:
    random_ = random.Random(name)
    noise = (lambda: random_.uniform(0.9, 1.1)) if noisy else (lambda: 1.0)
    estimator, counts = PathSpeedEstimator(PATHS), balanced_split(COUNT, PATHS)
    for truth in (PATHS, slowed(name, 4.0), PATHS):
        counts, _ = run(estimator, counts, truth, 5, noise)
        best = makespan_seconds(balanced_split(COUNT, truth), truth, SUBGROUP_BYTES)
        slack = 1.12 if noisy else 1.06
        assert makespan_seconds(counts, truth, SUBGROUP_BYTES) < slack * best


@pytest.mark.parametrize("seed", range(50))
def test_noise_moves_nothing(seed: int) -> None:
    random_ = random.Random(seed)
    start = balanced_split(COUNT, PATHS)
    counts, moves = run(PathSpeedEstimator(PATHS), start, PATHS, 400, lambda: random_.uniform(0.9, 1.1))
    assert (counts, moves) == (start, 0)


def test_one_hiccup_moves_nothing() -> None:
    start = balanced_split(COUNT, PATHS)
    estimator = PathSpeedEstimator(PATHS)
    for _ in range(5):
        assert run(estimator, start, slowed("nvme", 8.0), 1) == (start, 0)
        assert run(estimator, start, PATHS, 1) == (start, 0)
    assert estimator.rates["nvme"].read_bytes_per_second == pytest.approx(6e9)


def test_a_slow_drift_is_followed() -> None:
    estimator, counts = PathSpeedEstimator(PATHS), balanced_split(COUNT, PATHS)
    for percent in range(0, 60, 2):
        counts, _ = run(estimator, counts, slowed("nvme", 1 + percent / 100), 1)
    counts, moves = run(estimator, counts, slowed("nvme", 1.6), 30)
    truth = slowed("nvme", 1.6)
    best = makespan_seconds(balanced_split(COUNT, truth), truth, 1)
    assert makespan_seconds(counts, truth, 1) < 1.06 * best
    assert moves <= 2, "it settles"


def test_a_gain_below_the_threshold_is_left() -> None:
    made = {"a": rates(1, 1), "b": rates(1, 1)}
    assert rebalanced({"a": 52, "b": 48}, made) is None
    assert rebalanced({"a": 53, "b": 47}, made) == {"a": 50, "b": 50}
    assert rebalanced({"a": 52, "b": 48}, made, minimum_gain=0.01) == {"a": 50, "b": 50}


def test_what_moves_nothing_keeps_its_speed() -> None:
    estimator = PathSpeedEstimator(PATHS)
    estimator.observe({"nvme": PathTraffic(), "pfs": PathTraffic(read_bytes=1, read_seconds=0.0)})
    for name in ("nvme", "pfs"):
        assert estimator.rates[name].read_bytes_per_second == pytest.approx(PATHS[name].read_bytes_per_second)
    estimator.observe({"s3": PathTraffic(read_bytes=10**9, read_seconds=1.1)})
    assert estimator.rates["s3"].write_bytes_per_second == pytest.approx(0.5e9)
    assert 0.9e9 < estimator.rates["s3"].read_bytes_per_second < 1e9


def test_every_open_path_is_probed() -> None:
    truth = slowed("pfs", 1000.0)
    estimator = PathSpeedEstimator(PATHS)
    counts, _ = run(estimator, balanced_split(COUNT, PATHS), truth, 3)
    assert counts["pfs"] == 1
    # 1000 is 2 ** 10, and a rise is believed by degrees.
    assert run(estimator, counts, PATHS, 13)[0] == balanced_split(COUNT, PATHS), "so that its recovery is seen"
    assert rebalanced({"nvme": 40, "pfs": 30, "s3": 0}, PATHS) is not None
    closed = rebalanced({"nvme": 40, "pfs": 30, "s3": 0}, PATHS, capacity={"s3": 0})
    assert closed is None or closed["s3"] == 0
    few = {"nvme": 1, "pfs": 1, "s3": 0}
    assert rebalanced(few, PATHS) is None, "there are not enough for all"


def test_a_split_that_fits_no_more_is_left_at_once() -> None:
    estimator, counts = PathSpeedEstimator(PATHS), balanced_split(COUNT, PATHS)
    fuller = rebalanced(counts, estimator.rates, capacity={"nvme": counts["nvme"] - 1})
    assert fuller is not None
    assert fuller["nvme"] == counts["nvme"] - 1
    assert rebalanced({"gone": 3, "nvme": 30, "pfs": 30, "s3": 7}, estimator.rates) == balanced_split(COUNT, PATHS)
    with pytest.raises(CapacityError):
        rebalanced(counts, estimator.rates, capacity=dict.fromkeys(PATHS, 1))


def test_time_shared_by_reads_and_writes_is_counted_once() -> None:
    """On a shared device both lanes are busy for two seconds in all, a gigabyte each way: it does 1 GB/s alone."""
    step = {
        "a": PathTraffic(
            read_bytes=10**9, read_seconds=2, shared_read_seconds=2,
            write_bytes=10**9, write_seconds=2, shared_write_seconds=2,
        )
    }  # fmt: skip
    shared, duplex = PathSpeedEstimator({"a": rates(1, 1)}), PathSpeedEstimator({"a": rates(0.5, 0.5, DUPLEX)})
    for estimator in (shared, duplex):
        for _ in range(3):
            estimator.observe(step)
        assert makespan_seconds({"a": 1}, estimator.rates, 10**9) == pytest.approx(2.0)


BURST = 20
"""How many times as fast as it is a throttled path serves its saved-up credit."""


def throttled(counts: SubgroupCounts, truth: dict[str, PathSpeeds], credit_bytes: float) -> dict[str, PathTraffic]:
    """A step on paths that serve their first bytes in each direction at once, as a token bucket does."""
    found = {}
    for name, seen in traffic(counts, truth).items():
        at_once = min(credit_bytes, seen.read_bytes) * (1 - 1 / BURST)
        read = (seen.read_bytes - at_once) / truth[name].read_bytes_per_second
        write = (seen.write_bytes - at_once) / truth[name].write_bytes_per_second
        found[name] = PathTraffic(
            read_bytes=seen.read_bytes, read_seconds=read, write_bytes=seen.write_bytes, write_seconds=write
        )
    return found


@pytest.mark.parametrize("credit", [1.0, 3.0])
@pytest.mark.parametrize("slow", PATHS)
def test_saved_up_credit_does_not_make_the_split_swing(slow: str, credit: float) -> None:
    truth = slowed(slow, 4.0)
    truth = {name: rates(s.read_bytes_per_second / 1e9, s.write_bytes_per_second / 1e9) for name, s in truth.items()}
    known = {name: rates(s.read_bytes_per_second / 1e9, s.write_bytes_per_second / 1e9) for name, s in PATHS.items()}
    estimator, counts = PathSpeedEstimator(known), balanced_split(COUNT, known)
    taken = []
    for _ in range(200):
        seen = throttled(counts, truth, credit * SUBGROUP_BYTES)
        taken.append(max(one.read_seconds + one.write_seconds for one in seen.values()))
        estimator.observe(seen)
        counts = rebalanced(counts, estimator.rates) or counts
    # About as good as without any credit, which is what the rates promise, but for a look now and then.
    promised = makespan_seconds(balanced_split(COUNT, truth), truth, SUBGROUP_BYTES)
    looks = [one for one in taken[10:] if one > 1.1 * promised]
    assert len(looks) < 0.08 * len(taken)
    assert sum(taken[10:]) / len(taken[10:]) < 1.15 * promised


def held_up(counts: SubgroupCounts, truth: dict[str, PathSpeeds], first: str, alternate: int) -> dict[str, PathTraffic]:
    """A step that the path `first` holds up all along; the others serve what little they get at once.

    Its reads and writes fill its time in turns: one way is in progress throughout, the other for a moment, as with two
    throttled queues that wait for each other.
    """
    nbytes = counts[first] * SUBGROUP_BYTES
    step = nbytes * truth[first].seconds_per_byte
    found = {}
    for name, n in counts.items():
        moved = n * SUBGROUP_BYTES
        if name == first:
            long, short = step, step / 20
            read, write = (long, short) if alternate % 2 else (short, long)
            busy = step
        else:
            read = write = moved * truth[name].seconds_per_byte / BURST
            busy = read + write
        found[name] = PathTraffic(
            read_bytes=moved, read_seconds=read, write_bytes=moved, write_seconds=write,
            whole=PathStepTotals(read_bytes=moved, write_bytes=moved, busy_seconds=busy, step_seconds=step),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("slow", ["disk", "memory", "archive"])
def test_a_path_that_holds_all_up_shows_its_cost_whichever_way_it_waits_and_the_others_show_nothing(slow: str) -> None:
    """Two steps tell; those that are served at once meanwhile are not taken for faster than they are."""
    known = {"disk": rates(4, 4, DUPLEX), "memory": rates(2, 2, DUPLEX), "archive": rates(1, 1, DUPLEX)}
    truth = known | {slow: rates(0.25 * known[slow].read_bytes_per_second / 1e9, 9.0, DUPLEX)}
    estimator, counts = PathSpeedEstimator(known), balanced_split(COUNT, known)
    for step in range(10):
        estimator.observe(held_up(counts, truth, slow, step))
        if step == 1:
            early = rebalanced(counts, estimator.rates)
    best = balanced_split(COUNT, truth)
    proposed = rebalanced(counts, estimator.rates)
    assert proposed is not None
    assert proposed == early, "two steps tell"
    assert max(abs(proposed[name] - best[name]) for name in best) <= 1


def gigabyte(each_way: float, busy: float, step: float) -> PathTraffic:
    """A step in which a path reads and writes a gigabyte. In seconds: each way, either of them, all paths."""
    return PathTraffic(
        read_bytes=10**9, read_seconds=each_way, write_bytes=10**9, write_seconds=each_way,
        whole=PathStepTotals(read_bytes=10**9, write_bytes=10**9, busy_seconds=busy, step_seconds=step),
    )  # fmt: skip


def test_what_rests_between_its_ops_keeps_what_it_showed_when_it_had_no_rest() -> None:
    """As fast as known it may be, in between of the ways apart and all the time together: nothing new is learnt."""
    known = {"a": rates(1, 1, DUPLEX)}
    estimator = PathSpeedEstimator(known)
    seen = gigabyte(each_way=0.7, busy=1.2, step=3.0)
    for _ in range(50):
        estimator.observe({"a": seen})
    assert makespan_seconds({"a": 1}, estimator.rates, 10**9) == pytest.approx(1.0)


def test_while_subgroups_move_unequal_amounts_do_not_tell_of_both_ways_together() -> None:
    estimator = PathSpeedEstimator({"a": rates(1, 1, DUPLEX)})
    moving = PathTraffic(
        read_bytes=10**9, read_seconds=1.0, write_bytes=10**8, write_seconds=0.1,
        whole=PathStepTotals(read_bytes=10**9, write_bytes=10**8, busy_seconds=9.0, step_seconds=9.0),
    )  # fmt: skip
    for _ in range(5):
        estimator.observe({"a": moving})
    assert makespan_seconds({"a": 1}, estimator.rates, 10**9) == pytest.approx(1.0)


def test_a_path_that_rests_because_little_is_given_to_it_is_found_faster_too_but_later() -> None:
    """As with weights that leave it little: what it really does is shown and simulated, so it must not stay unknown."""
    estimator = PathSpeedEstimator({"a": rates(1, 1, DUPLEX)})
    seen = gigabyte(each_way=0.25, busy=0.25, step=10.0)

    def cost() -> float:
        estimator.observe({"a": seen})
        return makespan_seconds({"a": 1}, estimator.rates, 10**9)

    assert [cost() for _ in range(15)] == [pytest.approx(1.0)] * 15
    assert [cost() for _ in range(2)] == [pytest.approx(0.5), pytest.approx(0.25)]


SECONDS = st.floats(0.01, 100.0)
FACTORS = st.floats(0.05, 1.0)


@given(SECONDS, SECONDS, SECONDS, st.tuples(FACTORS, FACTORS))
def test_speeds_of_both_ways_agree_with_the_time_of_both_whatever_the_factors(
    read: float, write: float, both: float, factors: PairFactors
) -> None:
    def found(factors: PairFactors) -> tuple[float, float]:
        """The seconds of a gigabyte each way, if the filters have these estimates."""
        estimator = PathSpeedEstimator({"a": rates(1 / read, 1 / write, factors)})
        estimator._paths["a"]._both.seconds_per_byte = both / 1e9
        speeds = estimator.rates["a"]
        assert speeds.seconds_per_byte == pytest.approx(both / 1e9)
        return 1e9 / speeds.read_bytes_per_second, 1e9 / speeds.write_bytes_per_second

    found(factors)
    share = both / (read + write)
    assert found(HALF_DUPLEX) == pytest.approx((read * share, write * share))
    longer_read, longer_write = (both, min(write, both)), (min(read, both), both)
    if read == pytest.approx(write):
        assert found(DUPLEX) in (pytest.approx(longer_read), pytest.approx(longer_write)), "either may count as longer"
    else:
        assert found(DUPLEX) == pytest.approx(longer_read if read > write else longer_write)


@given(st.integers(1, 2**40), st.integers(1, 2**40), SECONDS, st.floats(0.5, 1.0))
def test_bytes_that_count_are_the_mean_of_both_ways_on_a_shared_path_and_the_larger_on_a_duplex_one(
    read: int, write: int, busy: float, factor: float
) -> None:
    whole = PathStepTotals(read_bytes=read, write_bytes=write, busy_seconds=busy, step_seconds=busy)
    between = whole.seconds_per_byte((factor, factor))
    assert whole.seconds_per_byte(HALF_DUPLEX) == busy / ((read + write) / 2)
    assert whole.seconds_per_byte(DUPLEX) == busy / max(read, write)
    assert whole.seconds_per_byte(DUPLEX) <= between * (1 + 1e-12)
    assert between <= whole.seconds_per_byte(HALF_DUPLEX) * (1 + 1e-12)


def test_a_few_small_transfers_do_not_lower_a_speed_before_they_last() -> None:
    """One subgroup of 4 MB waits 100 ms for something else; 8 steps of it are believed, and so are larger transfers."""

    def seen(nbytes: int, transfers: int) -> dict[str, PathTraffic]:
        seconds = 0.1 * nbytes / 4e6
        return {"nvme": PathTraffic(read_bytes=nbytes, read_seconds=seconds, transfers=transfers)}

    for nbytes, transfers, steps in ((4_000_000, 1, 8), (4_000_000, 4, 2), (100_000_000, 1, 2)):
        estimator = PathSpeedEstimator(PATHS)
        for _ in range(steps - 1):
            estimator.observe(seen(nbytes, transfers))
        assert estimator.rates["nvme"].read_bytes_per_second == pytest.approx(6e9)
        estimator.observe(seen(nbytes, transfers))
        assert estimator.rates["nvme"].read_bytes_per_second < 1e9
