"""Speeds of paths in the rate card: seconds of fetches and flushes, what was seen, and the way over the wire."""

from dataclasses import replace

import pytest

from tidegate.errors import ConfigError
from tidegate.plan import Op, OpKind, Placement, Plan, Subgroup, make_plan
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import PathRates, RateCard, measured_work
from tidegate.wire.agent import Rates

CARD = RateCard(
    h2d_bytes_per_second=100.0,
    d2h_bytes_per_second=50.0,
    cpu_params_per_second=10.0,
    device_params_per_second=200.0,
    norm_params_per_second=400.0,
    overhead_seconds=0.0,
    paths={
        "nvme": PathRates(read_bytes_per_second=30.0, write_bytes_per_second=20.0),
        "pfs": PathRates(read_bytes_per_second=5.0, write_bytes_per_second=4.0),
    },
)


def tiered_plan() -> Plan:
    subgroups = [Subgroup(i, 10 + i, 2, 2, 10) for i in range(8)]
    placements = [
        Placement("device" if i % 3 else "cpu", path, path, False) for i, path in enumerate(("nvme", "pfs") * 4)
    ]
    return make_plan(subgroups, placements, num_slots=2, host_slots={"nvme": 2, "pfs": 2}, rates=CARD)


@pytest.mark.parametrize(
    ("kind", "path", "seconds"),
    [
        (OpKind.FETCH, "nvme", 10.5),
        (OpKind.FLUSH, "nvme", 15.5),
        (OpKind.FETCH, "pfs", 60.5),
        (OpKind.FLUSH, "pfs", 75.5),
    ],
)
def test_seconds(kind: OpKind, path: str, seconds: float) -> None:
    assert replace(CARD, overhead_seconds=0.5).seconds(Op(0, kind, 0, 300, 0, path=path)) == seconds


@pytest.mark.parametrize("path", ["pfs", "elsewhere"])
def test_a_path_that_was_never_written_is_named(path: str) -> None:
    card = replace(CARD, paths={"pfs": PathRates(read_bytes_per_second=5.0)})
    assert card.missing == ("pfs:write",)
    with pytest.raises(ConfigError, match=f"lacks the rate {path}:write, which flush 3 {path} needs"):
        card.seconds(Op(0, OpKind.FLUSH, 3, 1, 0, path=path))


def test_what_cannot_be_a_rate() -> None:
    with pytest.raises(ConfigError, match="write_bytes_per_second=0"):
        PathRates(write_bytes_per_second=0.0)


@pytest.mark.parametrize("card", [CARD, replace(CARD, paths={}), replace(CARD, paths={"pfs": PathRates()})])
def test_round_trips(card: RateCard) -> None:
    assert RateCard.from_dict(card.to_dict()) == card
    assert RateCard.from_dict(Rates(**card.to_dict()).model_dump()) == card


def test_what_a_newer_version_adds_is_ignored_and_a_rate_of_0_is_not_known() -> None:
    path = {"read_bytes_per_second": 5.0, "write_bytes_per_second": 0.0, "of_a_newer_version": 1.0}
    card = RateCard.from_dict({"h2d_bytes_per_second": 0.0, "overhead_seconds": 0.0, "paths": {"pfs": path}})
    assert card == RateCard(overhead_seconds=0.0, paths={"pfs": PathRates(read_bytes_per_second=5.0)})


def test_a_card_without_paths_says_nothing_of_them() -> None:
    assert "paths" not in RateCard().to_dict()


def test_rates_come_back_from_a_simulated_step() -> None:
    timeline = simulate(tiered_plan(), CARD, step_at=10.0)
    found = RateCard.from_measured_work([measured_work(timeline.spans)] * 2)
    assert found.paths.keys() == CARD.paths.keys()
    for path, rates in found.paths.items():
        assert rates.read_bytes_per_second == pytest.approx(CARD.paths[path].read_bytes_per_second)
        assert rates.write_bytes_per_second == pytest.approx(CARD.paths[path].write_bytes_per_second)


def test_what_was_not_seen_is_kept() -> None:
    timeline = simulate(tiered_plan(), CARD, step_at=10.0)
    reads = replace(timeline, spans=tuple(span for span in timeline.spans if span.lane == "nvme:read"))
    old = PathRates(read_bytes_per_second=1.0, write_bytes_per_second=2.0)
    previous = replace(CARD, paths={**CARD.paths, "nvme": old})
    found = RateCard.from_measured_work([measured_work(reads.spans)], previous)
    assert found.paths["pfs"] == CARD.paths["pfs"]
    assert found.paths["nvme"].read_bytes_per_second == pytest.approx(30.0)
    assert found.paths["nvme"].write_bytes_per_second == 2.0
    assert found.cpu_params_per_second == CARD.cpu_params_per_second
