"""The predictor: predicts updates of one rank from what is known of the rank at one moment. The tuner, previews,
canaries and advice use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType

from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Subgroup
from tidegate.plan.residency import GradientBudget
from tidegate.plan.tier_split import PathSpeeds
from tidegate.simulator.path_capacity import capacity_shortfall
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import Prediction, predicted_seconds, what_if
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import AgentHello
from tidegate.wire.evidence import MAX_RUNS, ModelEvidence, PathSpeed, SizeRuns, SubgroupSizes


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts the updates of one rank. Equal fields give equal predictions. The agent sends its fields to the daemon
    (`evidence`), so that both predict the same. Exception: a message holds at most MAX_RUNS entries. If a list of
    subgroups needs more, it is sent without its order, and the daemon's predictions may differ.

    backward_seconds: typical length of the backward; None if it is unknown.
    """

    rank: Rank
    rates: RateCard
    backward_seconds: float | None

    def update_seconds(self, knobs: EffectiveKnobs) -> float:
        """Predicted seconds of the update under these knobs. ConfigError when a rate that they need is not known."""
        return predicted_seconds(self.rank, knobs, self.rates, backward_seconds=self.backward_seconds)

    def predict(self, knobs: EffectiveKnobs) -> Prediction:
        """The predicted update under these knobs: time, stalls, bytes and memory. ConfigError as above."""
        return what_if(self.rank, knobs, self.rates, backward_seconds=self.backward_seconds)

    def capacity_shortfall(self, knobs: EffectiveKnobs) -> str:
        """The path that is too small for its share under these knobs, as a sentence; empty if there is none."""
        return capacity_shortfall(self.rank, knobs, self.rates)

    def evidence(
        self,
        registered: Sequence[Subgroup],
        *,
        retired_reasons: Mapping[str, str] = MappingProxyType({}),
        automatic_cache_bytes: int | None = None,
    ) -> ModelEvidence:
        """The message from which `predictor_of` makes an equal predictor. registered: the subgroups at the registration
        of the rank. The other arguments are fields of the message that predictors do not use."""
        rank = self.rank
        budget = rank.gradient_budget if rank.gradients == "release" else None
        return ModelEvidence(
            subgroups=None if rank.subgroups == registered else size_runs(rank.subgroups),
            gradient_order=None if rank.gradient_order is None else _id_runs(tuple(rank.gradient_order)),
            early_gradients=rank.early_gradients,
            step_at=rank.step_at,
            idle_seconds=rank.idle_seconds,
            backward_seconds=self.backward_seconds,
            path_speeds={path: PathSpeed(**asdict(speeds)) for path, speeds in (rank.path_speeds or {}).items()},
            capacity=dict(rank.capacity),
            retired=tuple(rank.retired),
            retired_reasons=dict(retired_reasons),
            automatic_cache_bytes=automatic_cache_bytes,
            gradient_budget_bytes=None if budget is None else max(0, budget.device_bytes),
            most_gradient_bytes=0 if budget is None else budget.most_bytes,
        )


def predictor_of(hello: AgentHello, evidence: ModelEvidence, rates: RateCard) -> Predictor:
    """The predictor of a rank, from its messages."""
    speeds = {path: PathSpeeds(**sent.model_dump()) for path, sent in evidence.path_speeds.items()}
    budget = evidence.gradient_budget_bytes
    rank = Rank(
        subgroups=subgroups_of(hello.subgroups if evidence.subgroups is None else evidence.subgroups),
        num_slots=hello.num_slots,
        host_slots=dict.fromkeys(hello.paths, hello.host_slots),
        gradients=hello.gradients,
        early_gradients=evidence.early_gradients,
        capacity=evidence.capacity,
        retired=evidence.retired,
        gradient_order=None if evidence.gradient_order is None else _ids(evidence.gradient_order),
        step_at=evidence.step_at,
        idle_seconds=evidence.idle_seconds,
        path_speeds=speeds or None,
        gradient_budget=None if budget is None else GradientBudget(budget, evidence.most_gradient_bytes),
    )
    return Predictor(rank=rank, rates=rates, backward_seconds=evidence.backward_seconds)


def size_runs(subgroups: Sequence[Subgroup]) -> SizeRuns:
    """The sizes of subgroups in the order of their ids, as runs of equal sizes. If there are too many runs for a
    message, equal sizes are gathered without regard to the order."""
    sizes = [(s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in subgroups]
    runs: list[tuple[tuple[int, int, int, int], int]] = [(size, len([*same])) for size, same in groupby(sizes)]
    if len(runs) > MAX_RUNS:
        runs = [*Counter(sizes).items()]
    return tuple(
        SubgroupSizes(numel=numel, count=count, weight_bytes=weight, grad_bytes=grad, state_bytes=state)
        for (numel, weight, grad, state), count in runs
    )


def subgroups_of(runs: SizeRuns) -> tuple[Subgroup, ...]:
    """The subgroups with these sizes, numbered from 0."""
    kinds = [Subgroup(0, run.numel, run.weight_bytes, run.grad_bytes, run.state_bytes) for run in runs]
    repeated = [kind for kind, run in zip(kinds, runs, strict=True) for _ in range(run.count)]
    return tuple(replace(subgroup, id=number) for number, subgroup in enumerate(repeated))


@lru_cache(maxsize=8)
def _id_runs(ids: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """The ids as runs (first, last) that grow or shrink by 1; None if there are too many for a message."""
    runs: list[list[int]] = []
    for i in ids:
        run = runs[-1] if runs else None
        if run is not None and abs(i - run[1]) == 1 and (run[0] == run[1] or (i > run[1]) == (run[1] > run[0])):
            run[1] = i
        else:
            runs.append([i, i])
    return tuple((first, last) for first, last in runs) if len(runs) <= MAX_RUNS else None


def _ids(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(
        i for first, last in runs for i in (range(first, last + 1) if last >= first else range(first, last - 1, -1))
    )
