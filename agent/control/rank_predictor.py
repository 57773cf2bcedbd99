"""Makes the predictor of this rank from the present state of its engine and the measurements of its steps."""

from __future__ import annotations

from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer.offloaded_optimizer import OffloadedOptimizer
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.simulator.predictor import Predictor
from tidegate.simulator.steady_state import Rank
from tidegate.speeds.rate_card import RateCard


def rank_predictor(optimizer: OffloadedOptimizer, recorder: Recorder) -> Predictor:
    """The predictor of this rank as it is now. May be called from any thread. Before rates are measured, its rate card
    is empty, and predictions raise ConfigError."""
    return Predictor(
        rank=rank_of(optimizer.engine),
        rates=recorder.rates or RateCard(),
        backward_seconds=recorder.backward_seconds,
    )


def rank_of(engine: Engine) -> Rank:
    """The rank as the model needs it. Capacities are those with which the last step was planned, but 0 for a path
    that has failed since."""
    known = {} if engine.residences is None else engine.residences.known_capacity
    retired = () if engine.store is None else tuple(engine.store.retired)
    return Rank(
        subgroups=engine.subgroups,
        num_slots=engine.num_slots,
        host_slots=engine.host_slots,
        gradients=engine.gradients.mode,
        capacity={**known, **dict.fromkeys(retired, 0)},
        retired=retired,
        early_gradients=engine.planner.early_gradients,
        gradient_order=engine.routing.order,
        step_at=engine.planner.step_at,
        idle_seconds=engine.planner.idle_seconds,
        path_speeds=engine.planner.path_speeds,
        gradient_budget=engine.planner.budget.gradients if engine.gradients.mode == "release" else None,
    )
