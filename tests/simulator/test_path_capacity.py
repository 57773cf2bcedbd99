"""Whether paths can hold what knobs would put there: told with figures, or nothing said."""

from collections.abc import Mapping

import pytest

from tests.simulator.test_what_if import SLOTS, STORED, subgroups
from tidegate.knobs.knobs import EQ1
from tidegate.plan.effective_knobs import EffectiveKnobs, Split
from tidegate.simulator.path_capacity import capacity_shortfall
from tidegate.simulator.steady_state import Rank

CACHE_OF_TWO = 2_000_000_000


def said(capacity: Mapping[str, int], split: Split, cache: int = 0) -> str:
    """Of 12 subgroups."""
    rank = Rank(subgroups(12), 2, SLOTS, capacity=capacity)
    return capacity_shortfall(rank, EffectiveKnobs("off", 0.0, tier_split=split, host_cache_bytes=cache), STORED)


@pytest.mark.parametrize(
    ("capacity", "split", "sentence"),
    [
        ({}, (("nvme", 3.0), ("pfs", 1.0)), ""),
        ({"nvme": 9, "pfs": 3}, (("nvme", 3.0), ("pfs", 1.0)), ""),
        ({"nvme": 8}, (("nvme", 3.0), ("pfs", 1.0)),
         "Path nvme would get 9 subgroups and can hold 8; pfs takes 4. "
         "Give it less of tier_split, free space there, or raise host_cache."),
        ({"pfs": 3}, EQ1,
         "Path pfs would get 5 subgroups and can hold 3; nvme takes 9. "
         "Give it less of tier_split, free space there, or raise host_cache."),
        # Speeds decide among what paths can hold: none is asked for more.
        ({"nvme": 2}, None, ""),
    ],
)  # fmt: skip
def test_a_path_that_gets_more_than_it_can_hold(capacity: Mapping[str, int], split: Split, sentence: str) -> None:
    assert said(capacity, split) == sentence


def test_the_cache_makes_room() -> None:
    split: Split = (("nvme", 1.0), ("pfs", 1.0))
    assert "nvme would get 6 subgroups and can hold 5" in said({"nvme": 5}, split)
    assert said({"nvme": 5}, split, CACHE_OF_TWO) == ""


def test_what_fits_on_no_path_is_refused_in_the_same_words_as_by_a_rank() -> None:
    for split in (None, EQ1, (("nvme", 1.0),)):
        assert "12 subgroups do not fit on the paths: nvme takes 5" in said({"nvme": 5, "pfs": 2}, split)


def test_a_full_path_is_none_that_has_failed() -> None:
    """What a failed path cannot take may stay in host memory; what a full one cannot take is refused, as by a rank."""
    for capacity, split in (({"nvme": 0}, (("nvme", 1.0),)), ({"nvme": 0, "pfs": 3}, None)):
        assert "12 subgroups do not fit on the paths" in said(capacity, split)
        rank = Rank(subgroups(12), 2, SLOTS, capacity=capacity, retired=["nvme"])
        assert capacity_shortfall(rank, EffectiveKnobs("off", 0.0, tier_split=split), STORED) == ""


def test_a_rank_without_paths_has_none_to_fill() -> None:
    assert capacity_shortfall(Rank(subgroups(4), 2), EffectiveKnobs("off", 0.0), STORED) == ""
