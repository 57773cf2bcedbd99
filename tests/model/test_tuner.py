"""When the tuner moves, when it stays, and how often it looks."""

from __future__ import annotations

from dataclasses import replace

from tidegate.knobs import Off
from tidegate.model.rates import RateCard
from tidegate.model.simulate import what_if
from tidegate.model.tuner import FIRST_LOOK_STEPS, LONGEST_WAIT_STEPS, MINIMUM_GAIN, StrideTuner
from tidegate.plan.ops import Subgroup

SUBGROUPS = tuple(Subgroup(i, 1_000_000, 2, 2, 10) for i in range(16))
FAST_LINK = RateCard(
    h2d_bytes_per_second=50e9, d2h_bytes_per_second=50e9, cpu_params_per_second=1e9,
    device_params_per_second=20e9, norm_params_per_second=40e9,
)  # fmt: skip
SLOW_LINK = replace(FAST_LINK, h2d_bytes_per_second=0.5e9, d2h_bytes_per_second=0.5e9)


def run(tuner: StrideTuner, stride: float | Off, rates: RateCard, steps: int) -> list[tuple[int, float | Off]]:
    """Moves over so many steps: (step, new stride)."""
    moves = []
    for step in range(1, steps + 1):
        better = tuner.propose(stride, SUBGROUPS, 0.0, 2, lambda: rates)
        if better is not None:
            stride = better
            moves.append((step, better))
    return moves


def seconds(stride: float | Off, rates: RateCard) -> float:
    return what_if(SUBGROUPS, stride=stride, static_ratio=0.0, num_slots=2, rates=rates).update_seconds


def test_it_moves_once_to_what_is_predicted_to_be_better_and_stays() -> None:
    for start, rates in (("off", FAST_LINK), (1.0, SLOW_LINK)):
        moves = run(StrideTuner(), start, rates, 200)  # type: ignore[arg-type]
        assert [step for step, _ in moves] == [FIRST_LOOK_STEPS]
        assert seconds(moves[0][1], rates) < (1 - MINIMUM_GAIN) * seconds(start, rates)  # type: ignore[arg-type]


def test_it_follows_a_link_that_slowed_down() -> None:
    tuner = StrideTuner()
    settled = run(tuner, "off", FAST_LINK, 100)[-1][1]
    moves = run(tuner, settled, SLOW_LINK, LONGEST_WAIT_STEPS)
    assert len(moves) == 1
    assert seconds(moves[0][1], SLOW_LINK) < seconds(settled, SLOW_LINK)


def test_it_waits_for_rates_and_looks_at_the_first_step_that_has_them() -> None:
    tuner = StrideTuner()
    assert run(tuner, "off", replace(FAST_LINK, device_params_per_second=None), 50) == []
    assert [step for step, _ in run(tuner, "off", FAST_LINK, 3)] == [1]


def test_it_does_not_move_for_less_than_its_threshold() -> None:
    tuner = StrideTuner()
    best = run(tuner, "off", FAST_LINK, 100)[-1][1]
    assert run(StrideTuner(), best, FAST_LINK, 300) == []
