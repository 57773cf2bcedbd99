"""Who updates what: the knobs' arithmetic, in tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import KnobError
from tidegate.plan import place_subgroups, steady_placements

CPU, STAGED, RESIDENT = ("cpu", "host"), ("device", "host"), ("device", "device")


def drawn(count: int, stride: float | str, ratio: float) -> str:
    """c: CPU, d: staged to the device, R: resident."""
    letters = {CPU: "c", STAGED: "d", RESIDENT: "R"}
    return "".join(letters[p] for p in place_subgroups(count, stride=stride, static_ratio=ratio))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "stride", "ratio", "expected"),
    [
        (0, 2, 0.5, ""),
        (6, "off", 0.0, "cccccc"),
        (6, 1, 0.0, "dddddd"),
        (6, 2, 0.0, "cdcdcd"),
        (7, 3, 0.0, "ccdccdc"),
        (8, 2, 0.25, "cdcdcdRR"),
        (6, 1.5, 0.0, "cddcdd"),
        (10, 2.5, 0.0, "ccdcdccdcd"),
        (11, 1.1, 0.0, "cdddddddddd"),  # 11 / 1.1 is 10, though not in binary
        (4, 1_000_000.0, 0.0, "cccc"),
        (4, "off", 1.0, "RRRR"),
        (10, "off", 0.25, "cccccccRRR"),  # 2.5 rounds up
        (100, "off", 0.145, "c" * 85 + "R" * 15),  # 14.5 rounds up, though 0.145 × 100 is less in binary
        (10, "off", 0.04, "c" * 10),
    ],
)
def test_place(count: int, stride: float | str, ratio: float, expected: str) -> None:
    assert drawn(count, stride, ratio) == expected


@given(count=st.integers(0, 500), stride=st.integers(1, 50))
def test_whole_strides_are_algorithm_1(count: int, stride: int) -> None:
    assert [p == STAGED for p in place_subgroups(count, stride=stride, static_ratio=0.0)] == [
        (i + 1) % stride == 0 for i in range(count)
    ]


@given(count=st.integers(0, 500), stride=st.floats(1, 100))
def test_real_strides_are_spread_evenly(count: int, stride: float) -> None:
    places = place_subgroups(count, stride=stride, static_ratio=0.0)
    for end in range(count + 1):
        assert abs(places[:end].count(STAGED) - end / stride) <= 1 + 1e-9


@given(count=st.integers(0, 300), ratio=st.floats(0, 1), stride=st.floats(1, 10))
def test_processor_follows_the_id(count: int, ratio: float, stride: float) -> None:
    """More residents change only those that become residents."""
    before = place_subgroups(count, stride=stride, static_ratio=0.0)
    after = place_subgroups(count, stride=stride, static_ratio=ratio)
    first_resident = count - after.count(RESIDENT)
    assert after[:first_resident] == before[:first_resident]
    assert set(after[first_resident:]) <= {RESIDENT}
    assert abs(after.count(RESIDENT) - ratio * count) <= 0.5 + 1e-3


@pytest.mark.parametrize(("stride", "ratio"), [(0.5, 0), (0, 0), (-1, 0), (float("nan"), 0), ("auto", 0), (2, 1.1)])
def test_what_cannot_be_placed(stride: float, ratio: float) -> None:
    with pytest.raises(KnobError):
        place_subgroups(4, stride=stride, static_ratio=ratio)


def test_steady_keeps_state_where_it_is() -> None:
    placements = steady_placements(place_subgroups(4, stride=2, static_ratio=0.25))
    assert [(p.processor, p.before, p.after, p.mirror_valid) for p in placements] == [
        ("cpu", "host", "host", True),
        ("device", "host", "host", False),
        ("cpu", "host", "host", True),
        ("device", "device", "device", False),
    ]
