"""The rate card: seconds of an op, and rates from what was seen."""

from dataclasses import replace

import pytest

from tidegate.errors import ConfigError
from tidegate.plan import Op, OpKind, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard, measured_work
from tidegate.timeline.timeline import Span

CARD = RateCard(
    h2d_bytes_per_second=100.0,
    d2h_bytes_per_second=50.0,
    cpu_params_per_second=10.0,
    device_params_per_second=200.0,
    norm_params_per_second=400.0,
    overhead_seconds=0.5,
)


@pytest.mark.parametrize(
    ("kind", "nbytes", "numel", "seconds"),
    [
        (OpKind.STATE_H2D, 200, 0, 2.5),
        (OpKind.WEIGHT_H2D, 0, 0, 0.5),
        (OpKind.GRAD_D2H, 200, 0, 4.5),
        (OpKind.CPU_UPDATE, 0, 100, 10.5),
        (OpKind.DEVICE_UPDATE, 0, 100, 1.0),
        (OpKind.NORM, 0, 100, 0.75),
    ],
)
def test_seconds(kind: OpKind, nbytes: int, numel: int, seconds: float) -> None:
    assert CARD.seconds(Op(0, kind, 0, nbytes, numel)) == seconds


def test_a_rate_that_is_not_known_is_named() -> None:
    card = RateCard(h2d_bytes_per_second=1.0)
    assert "cpu_params_per_second" in card.missing
    with pytest.raises(ConfigError, match="cpu_params_per_second"):
        card.seconds(Op(0, OpKind.CPU_UPDATE, 0, 0, 1))


@pytest.mark.parametrize(("name", "value"), [("h2d_bytes_per_second", 0.0), ("overhead_seconds", -1.0)])
def test_what_cannot_be_a_rate(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        RateCard(**{name: value})


def test_dict_round_trip() -> None:
    assert RateCard.from_dict(CARD.to_dict()) == CARD
    assert RateCard.from_dict({"h2d_bytes_per_second": 2.0, "of_a_newer_version": 1}).h2d_bytes_per_second == 2.0


def test_rates_come_back_from_a_simulated_step() -> None:
    card = RateCard.from_dict(CARD.to_dict() | {"overhead_seconds": 0.0})
    subgroups = [Subgroup(i, 10 + i, 2, 2, 10) for i in range(8)]
    plan = make_plan(subgroups, steady_placements(place_subgroups(8, stride=2, static_ratio=0.25)), num_slots=2)
    timeline = simulate(plan, card, step_at=10.0)
    assert RateCard.from_measured_work([measured_work(timeline.spans)] * 2).to_dict() == pytest.approx(card.to_dict())


def test_an_op_takes_what_any_op_of_its_lane_takes() -> None:
    op = Op(0, OpKind.STATE_H2D, 0, nbytes=30, numel=0)
    card = RateCard(h2d_bytes_per_second=10.0, overhead_seconds=0.5, op_seconds={"h2d": 0.25, "d2h": 9.0})
    assert card.seconds(op) == pytest.approx(0.5 + 0.25 + 3.0)
    assert RateCard.from_dict(card.to_dict()) == card
    span = Span(0, OpKind.CPU_UPDATE, "cpu", 0, start=1.0, end=3.0, nbytes=0, numel=40)
    assert RateCard.from_measured_work([measured_work([span])], previous=card).seconds(op) == 3.0, (
        "live speeds have it in them"
    )
    with pytest.raises(ConfigError, match="op_seconds"):
        replace(card, op_seconds={"h2d": -1.0})


def test_what_was_not_seen_is_kept() -> None:
    span = Span(0, OpKind.CPU_UPDATE, "cpu", 0, start=1.0, end=3.0, nbytes=0, numel=40)
    assert RateCard.from_measured_work([measured_work([span])]).to_dict() == {
        **dict.fromkeys(CARD.to_dict()),
        "cpu_params_per_second": 20.0,
        "overhead_seconds": 0.0,
    }
    merged = RateCard.from_measured_work([measured_work([span])], previous=CARD)
    assert merged.to_dict() == CARD.to_dict() | {"cpu_params_per_second": 20.0, "overhead_seconds": 0.0}
    assert RateCard.from_measured_work([], previous=CARD) == CARD


def test_spans_at_the_same_time_count_once() -> None:
    spans = [Span(i, OpKind.STATE_H2D, "h2d", i, start=0.0, end=2.0, nbytes=10, numel=0) for i in range(2)]
    assert RateCard.from_measured_work([measured_work(spans)]).h2d_bytes_per_second == 10.0


def test_spans_in_no_order_and_within_each_other_count_once() -> None:
    rows = [(6.0, 8.0), (0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]
    spans = [Span(i, OpKind.GRAD_D2H, "d2h", i, start, end, nbytes=7, numel=0) for i, (start, end) in enumerate(rows)]
    assert measured_work(spans) == {"d2h_bytes_per_second": (28, 7.0)}


def test_speeds_of_a_path_from_elsewhere_go_without_what_its_ops_cost() -> None:
    card = RateCard(op_seconds={"cpu": 0.1, "disk:read": 0.2, "net:write": 0.3}).with_paths(
        {"disk": PathSpeeds(read_bytes_per_second=2e9, write_bytes_per_second=1e9)}
    )
    assert card.op_seconds == {"cpu": 0.1, "net:write": 0.3}
