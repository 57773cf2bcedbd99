"""The plan that is being executed, from its start to the result of its step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tidegate.agent.engine.op_runner import StepOutcome
from tidegate.plan import Plan
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import OpKind
from tidegate.timeline.step_result import StepResult
from tidegate.timeline.timeline import Span

READS_GRADIENT = (OpKind.GRAD_D2H, OpKind.GRAD_NORM, OpKind.DEVICE_UPDATE)
WRITES_WEIGHT = (OpKind.WEIGHT_H2D, OpKind.DEVICE_UPDATE)


def gradient_reads(plan: Plan) -> list[int]:
    """For each op that reads gradients in the framework's memory (spilled gradients are elsewhere): the id of its
    subgroup. A subgroup that is read by several ops occurs several times."""
    return [op.subgroup for op in plan.of_kind(*READS_GRADIENT) if not op.spilled]


@dataclass
class PlanInFlight:
    """The plan that is being executed. `outcome` is None until `step()` begins, and `stepped` is None until the norm of
    the gradients is known."""

    plan: Plan
    effective: EffectiveKnobs
    began: float
    """Start of the plan, in seconds on the monotonic clock."""
    outcome: StepOutcome | None = None
    stepped: tuple[int, ...] | None = None
    """Numbers of the parameters that this step updates: none if the step is skipped. None until the gradient norm is
    known."""
    has_returned: bool = False
    """Whether only deferred flushes are left, and `step()` returns before they are done."""

    @property
    def returns_early(self) -> bool:
        """Whether `step()` returns before the end of the plan, because flushes are deferred."""
        return bool(self.stepped and self.plan.deferred_flushes)

    def weight_writes(self, subgroups: Container[int]) -> list[int]:
        """Ids of the ops that write the weights of these subgroups on the device."""
        return [op.id for op in self.plan.of_kind(*WRITES_WEIGHT) if op.subgroup in subgroups]

    def result(self, spans: Sequence[Span], skipped: bool, dropped: Sequence[Span]) -> StepResult:
        """The result of the step, whose ops have all ended. `dropped`: spans of the plans that were dropped before."""
        found = self.outcome
        assert found is not None, "the step has begun"
        return StepResult(
            self.plan, (*dropped, *spans), skipped, found.grad_norm, self.effective, self.stepped or (),
            len(dropped), found.bad_params, found.inputs.skip,
        )  # fmt: skip
