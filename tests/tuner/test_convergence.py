"""The tuner as a whole, in virtual time: how near the best it comes and how soon, from anywhere, with noise and drift.

Nothing here reads a clock: what a busy machine makes of the same is measured by bench/tuner.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tuner.virtual import VirtualTraining
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.speeds.rate_card import RateCard

FAST_LINK = RateCard(
    h2d_bytes_per_second=25e9,
    d2h_bytes_per_second=25e9,
    cpu_params_per_second=1.5e9,
    device_params_per_second=25e9,
    norm_params_per_second=500e9,
)
SLOW_LINK = replace(FAST_LINK, h2d_bytes_per_second=4e9, d2h_bytes_per_second=4e9)
HALVED = replace(FAST_LINK, h2d_bytes_per_second=12.5e9, d2h_bytes_per_second=12.5e9)
FAST_CPU = replace(FAST_LINK, cpu_params_per_second=6e9, h2d_bytes_per_second=8e9, d2h_bytes_per_second=8e9)
MACHINES = {"fast link": FAST_LINK, "slow link": SLOW_LINK, "fast CPU": FAST_CPU}
NEAR = 0.05


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("static_ratio", [0.0, 0.3])
def test_from_the_worst_it_is_near_the_best_in_twenty_steps(machine: str, static_ratio: float) -> None:
    training = VirtualTraining(MACHINES[machine], EffectiveKnobs(2.0, static_ratio))
    training.now = training.worst()
    assert training.off_best > 0.2, "there is something to gain"
    assert training.run(20).off_best <= NEAR
    found = training.now
    assert training.run(150).now == found, "it stays"


NOISES = {"steps": {"noise": 0.2}, "lanes": {"lane_noise": 0.2}}
"""±20 % each: of whole steps, as when others use the machine; of each lane on its own."""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("machine", MACHINES)
def test_with_noise_it_hardly_moves(machine: str, noise: str, seed: int) -> None:
    """From the best: at most one change in 50 steps, those of comparisons included, and it stays near."""
    training = VirtualTraining(MACHINES[machine], EffectiveKnobs(2.0, 0.0), **NOISES[noise], seed=seed)
    training.now = training.best()
    training.run(400)
    assert len(training.changes) <= 400 / 50
    assert training.off_best <= 2 * NEAR


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("machine", MACHINES)
def test_with_noise_it_comes_near_the_best(machine: str, noise: str) -> None:
    training = VirtualTraining(MACHINES[machine], EffectiveKnobs(2.0, 0.0), **NOISES[noise])
    training.now = training.worst()
    training.run(50)
    assert training.off_best <= 2 * NEAR


@pytest.mark.parametrize("begin", ["worst", "best"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_follows_a_link_that_becomes_slower_and_faster(begin: str, noise: float) -> None:
    training = VirtualTraining(FAST_LINK, EffectiveKnobs(2.0, 0.0), noise=noise)
    training.now = training.worst() if begin == "worst" else training.best()
    training.run(60)
    assert training.off_best <= NEAR
    for rates in (HALVED, FAST_LINK, SLOW_LINK, FAST_LINK):
        training.truth = rates
        assert training.off_best > NEAR, "what was best no longer is"
        training.run(24)
        assert training.off_best <= NEAR
        training.run(40)
