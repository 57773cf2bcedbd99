"""The papers' closed forms against figures worked out by hand from the papers' rates."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tidegate.errors import ConfigError
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.paper_equations import (
    cpu_to_device_ratio,
    interleaved_seconds,
    stored_seconds,
    stride_from_ratio,
)

V100 = {"B": 3e9, "U_c": 2e9, "U_g": 35e9, "D_c": 8.7e9}
"""DOS section 5.4, the V100 node."""
H100 = {"B": 55e9 / 4, "U_c": 8e9 / 4, "U_g": 100e9 / 4}
"""DOS sections 1 and 5.1, of 4 GPUs one: 55 GB/s a link of its own, a quarter of 8 and 100 billion parameters/s."""


@pytest.mark.parametrize(
    ("rates", "ratio", "share"),
    [
        # (3/3 + 1/35) / (1/2 + 1/8.7 - 1/6) = 1.02857 / 0.44828. The paper runs it at stride 2.
        (V100, 2.2945, 0.3035),
        # (3/13.75 + 1/25) / (1/2 - 1/27.5) = 0.25818 / 0.46364: the update writes 16 bits itself.
        (H100, 0.5569, 0.6423),
        # Conversion of fp32 at 62 GB/s (DOS Table 1), if one GPU's process had it alone: 0.25818 / 0.52815.
        (H100 | {"D_c": 62e9 / 4}, 0.4888, 0.6717),
        # …and if four share it: 0.25818 / 0.72170.
        (H100 | {"D_c": 62e9 / 16}, 0.3577, 0.7365),
        # No link limit, equal processors: one each.
        ({"B": math.inf, "U_c": 1e9, "U_g": 1e9}, 1.0, 0.5),
    ],
)
def test_equation_1_of_dos(rates: dict[str, float], ratio: float, share: float) -> None:
    assert cpu_to_device_ratio(**rates) == pytest.approx(ratio, abs=1e-4)
    assert 1 / stride_from_ratio(cpu_to_device_ratio(**rates)) == pytest.approx(share, abs=1e-4)


rate = st.floats(1e6, 1e13)


@given(B=rate, U_c=rate, U_g=rate, D_c=rate)
def test_equation_1_balances_cpu_and_link(B: float, U_c: float, U_g: float, D_c: float) -> None:  # noqa: N803, RUF100
    """k (1/U_c + 1/D_c) = 3/B + k/(2B) + 1/U_g: the line of Eq. 1 before it is solved for k."""
    k = cpu_to_device_ratio(B, U_c, U_g, D_c)
    if math.isinf(k):
        assert 1 / U_c + 1 / D_c <= 1 / (2 * B)
    elif 1 / U_c + 1 / D_c > 1.001 / (2 * B):
        assert k * (1 / U_c + 1 / D_c) == pytest.approx(3 / B + k / (2 * B) + 1 / U_g)


@given(ratio=st.floats(0, 1e6))
def test_stride_and_ratio_are_the_same_share(ratio: float) -> None:
    assert 1 / stride_from_ratio(ratio) == pytest.approx(1 / (ratio + 1))


def test_a_slow_link_leaves_all_to_the_cpu() -> None:
    assert cpu_to_device_ratio(B=1e9, U_c=4e9, U_g=50e9) == math.inf


@pytest.mark.parametrize("name", ["B", "U_c", "U_g", "D_c"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_rates_are_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        cpu_to_device_ratio(**(V100 | {name: value}))


def test_the_bound_of_a_ratio() -> None:
    with pytest.raises(ConfigError, match="ratio"):
        stride_from_ratio(-0.5)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e10), st.floats(1e9, 1e11))
def test_the_ratio_of_dos_is_where_both_sides_take_equally_long(B: float, U_c: float, U_g: float) -> None:
    ratio = cpu_to_device_ratio(B, U_c, U_g)
    assume(1e-3 < ratio < 1e3)
    whole = 1e9
    on_cpu = whole * ratio / (1 + ratio)
    best = interleaved_seconds(on_cpu, whole - on_cpu, B, U_c, U_g)
    for shift in (-0.1, 0.1):
        other = on_cpu + shift * min(on_cpu, whole - on_cpu)
        assert interleaved_seconds(other, whole - other, B, U_c, U_g) > best * (1 + 1e-6)


def test_the_storage_of_mlp_takes_what_its_slowest_path_takes() -> None:
    speeds = {
        "nvme": PathSpeeds(read_bytes_per_second=6e9, write_bytes_per_second=5e9),
        "pfs": PathSpeeds(read_bytes_per_second=3e9, write_bytes_per_second=4e9),
    }
    assert stored_seconds({"nvme": 5e9, "pfs": 3e9}, speeds) == pytest.approx(2.0)
    assert stored_seconds({"nvme": 5e9, "pfs": 6e9}, speeds) == pytest.approx(4.0)
    assert stored_seconds({}, speeds) == 0.0
