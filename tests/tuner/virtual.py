"""A training in virtual time: the tuner as the agent runs it, on a machine whose speeds only its spans show."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache

from tidegate.knobs.knobs import Off
from tidegate.plan import Plan, Subgroup
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Op
from tidegate.simulator.predictor import Predictor
from tidegate.simulator.simulate import simulate
from tidegate.simulator.steady_state import Rank, steady_steps
from tidegate.speeds.live_rates import LiveRates
from tidegate.speeds.rate_card import RateCard, measured_work
from tidegate.tuner.proposal import find_move
from tidegate.tuner.tuner import Move, Tuner

STRIDES: tuple[float | Off, ...] = ("off", *(1 + i / 4 for i in range(29)), 10.0, 12.0, 16.0)
"""What the best is looked for among: finer than the tuner's own list."""


def subgroups(count: int, numel: int = 100_000_000) -> list[Subgroup]:
    return [Subgroup(i, numel, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


@cache
def _plan(count: int, slots: int, effective: EffectiveKnobs, turn: int) -> Plan:
    rank = Rank(subgroups(count), slots)
    turns = steady_steps(rank, effective, RateCard())
    return turns[turn % len(turns)].plan(RateCard())


@dataclass
class VirtualTraining:
    """One rank without paths. `truth`: what the machine does; it may be replaced at any time, nobody is told."""

    truth: RateCard
    now: EffectiveKnobs
    free: Collection[str] = ("stride",)
    noise: float = 0.0
    """Largest share by which all lanes are faster or slower in one step."""
    lane_noise: float = 0.0
    """And that of each lane alone."""
    count: int = 24
    slots: int = 2
    backward_seconds: float = 2.0
    seed: int = 0
    tuner: Tuner = field(default_factory=lambda: Tuner(clock=lambda: 0.0))
    live: LiveRates = field(default_factory=LiveRates)
    changes: list[tuple[int, EffectiveKnobs]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def run(self, steps: int) -> VirtualTraining:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> float:
        """Seconds of the update."""
        plan = _plan(self.count, self.slots, self.now, self.steps)
        whole = self._off(self.noise)
        lanes = {lane: whole * self._off(self.lane_noise) for lane in plan.lane_names}

        def durations(op: Op) -> float:
            return self.truth.seconds(op) * lanes[op.lane]

        timeline = simulate(plan, self.truth, step_at=self.backward_seconds, durations=durations)
        update = timeline.phases[-1].end - timeline.phases[-1].start
        if self.live.observe(measured_work(timeline.spans)):
            self.tuner.speeds_changed()
        self.steps += 1
        self.tuner.observe(self.now, update)
        wanted = self.tuner.propose(self.now, self._look if self.tuner.due(self.now) else None)
        if wanted is not None:
            self.now = wanted
            self.changes.append((self.steps, wanted))
        return update

    def _off(self, most: float) -> float:
        return self._chance.uniform(1 - most, 1 + most)

    def _look(self) -> Move | None:
        card = self.live.card
        if card is None:
            return None
        rank = Rank(subgroups(self.count), self.slots)
        predictor = Predictor(rank=rank, rates=card, backward_seconds=self.backward_seconds)
        return find_move(predictor, self.now, self.free)

    def seconds(self, effective: EffectiveKnobs) -> float:
        """The update without noise."""
        plan = _plan(self.count, self.slots, effective, 0)
        update = simulate(plan, self.truth, step_at=self.backward_seconds).phases[-1]
        return update.end - update.start

    def all_seconds(self) -> dict[float | Off, float]:
        return {stride: self.seconds(replace(self.now, stride=stride)) for stride in STRIDES}

    @property
    def off_best(self) -> float:
        """How much longer the update takes with the present knobs than with the best."""
        return self.seconds(self.now) / min(self.all_seconds().values()) - 1

    def best(self) -> EffectiveKnobs:
        times = self.all_seconds()
        return replace(self.now, stride=min(times, key=lambda stride: times[stride]))

    def worst(self) -> EffectiveKnobs:
        times = self.all_seconds()
        return replace(self.now, stride=max(times, key=lambda stride: times[stride]))
