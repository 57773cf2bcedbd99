"""Logs warnings about steps that change no weight, and one warning about parameters that no step changes. If such steps
repeat, only the 1st, 10th, 100th and every 1000th is logged."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence

import torch

from tidegate.agent.parameters.parameter_identity import name_of
from tidegate.agent.parameters.shards import shard_of
from tidegate.logs import event
from tidegate.timeline.step_result import StepPhases, StepResult

log = logging.getLogger("tidegate")

SCALER_SKIPS_ALLOWED = 10
"""Number of skipped steps in a row at which the first warning is logged if a GradScaler is used. A GradScaler starts
with a scale that is too large, and finds a smaller one by skipping a few steps."""
EMPTY_STEPS_ALLOWED = 3
"""Number of calls of `step()` without gradients in a row at which the first warning is logged. Some scripts call
`step()` once before training, for a scheduler."""
UPDATES_BEFORE_UNTRAINED_WARNING = 20
"""Number of updates after which a warning names the parameters that never had a gradient."""


class IneffectiveStepWarnings:
    """Counts steps that change no weight (ineffective steps), and logs warnings about them. `name`: function that
    returns the name of a parameter by its number."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self.num_skipped = 0
        """Steps that were skipped because gradients were not finite."""
        self._name = name
        self._steps = 0
        self._skipped_in_a_row = 0
        self._empty_in_a_row = 0
        self._untrained: set[int] = set()
        """Parameters without an update since the last call of `watch`; empty after the check has ended."""
        self._updates = 0
        self._said_untrained = False

    def watch(self, num_params: int) -> None:
        """Starts the check that each of the `num_params` parameters is updated in the next steps."""
        self._untrained = set() if self._said_untrained else set(range(num_params))
        self._updates = 0

    def observe_update(self, numbers: Collection[int], params: Sequence[torch.Tensor]) -> None:
        """Records a step that updates the parameters with these `numbers`, and warns once if some of `params` had no
        update in UPDATES_BEFORE_UNTRAINED_WARNING steps."""
        if not self._untrained:
            return
        self._untrained.difference_update(numbers)
        self._updates += 1
        if self._updates < UPDATES_BEFORE_UNTRAINED_WARNING:
            return
        left = [i for i in sorted(self._untrained) if params[i].requires_grad and shard_of(params[i]).numel()]
        self._untrained = set()
        if left:
            self._said_untrained = True
            log.warning(
                "%d of the optimizer's %d parameters (the first: %s) had no gradient in %d steps and are not trained: "
                "that is fine where they are unused, or frozen otherwise than by requires_grad=False. Where a part of "
                "the model was replaced or sharded after the optimizer was built (a new head, fully_shard), build the "
                "optimizer again from the model's parameters.",
                len(left), len(params), self._name(left[0]), self._updates,
                extra=event("untrained", parameters=len(left), steps=self._updates),
            )  # fmt: skip

    def observe(self, result: StepResult, _: StepPhases) -> None:
        """Records the result of a step, and warns if the step was skipped."""
        self._steps += 1
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        if result.scaled:
            patience_ended = self._skipped_in_a_row >= SCALER_SKIPS_ALLOWED
            if patience_ended and _is_due(self._skipped_in_a_row - SCALER_SKIPS_ALLOWED + 1):
                self._warn(result.bad_params, "The GradScaler's scale keeps falling: check its init_scale.")
        elif _is_due(self.num_skipped):
            self._warn(result.bad_params, "In fp16, scale the loss with a GradScaler, or train in bf16.")

    def observe_call(self, num_params: int, any_gradient: bool) -> None:
        """Records a call of `step()`, and warns after several calls in a row without any gradient.

        num_params: number of parameters. any_gradient: whether any of them has a gradient.
        """
        self._empty_in_a_row = 0 if any_gradient else self._empty_in_a_row + 1
        count = self._empty_in_a_row - EMPTY_STEPS_ALLOWED + 1
        if count > 0 and _is_due(count):
            log.warning(
                "step() found no gradient on any of the %d parameters, %d times in a row: nothing is trained. If "
                "backward() is called before step(), the model no longer has the optimizer's parameters: they were "
                "replaced after the optimizer was built (fully_shard, a wrapper, another model). Build the optimizer "
                "from the model that is trained, or give both to accelerator.prepare() together. The optimizer's "
                "first parameter is %s.",
                num_params, self._empty_in_a_row, self._name(0),
                extra=event("no_gradients", steps=self._empty_in_a_row),
            )  # fmt: skip

    def _warn(self, bad_params: tuple[int, ...], of_scaling: str) -> None:
        if not bad_params:
            where = "a gradient on another rank, or a gradient that the GradScaler checked, is"
        elif len(bad_params) == 1:
            where = f"the gradient of parameter {self._name(bad_params[0])} is"
        else:
            where = f"the gradients of parameter {self._name(bad_params[0])} and of {len(bad_params) - 1} more are"
        log.warning(
            "A step was skipped, weights and state are unchanged: %s not finite (NaN or infinite). It is the %s "
            "skipped step of %s. Check the loss and the batch of this step, and the learning rate; clip with "
            "max_grad_norm. torch.autograd.set_detect_anomaly(True) names the operation that produced such values. %s",
            where, f"{self.num_skipped:,}.", f"{self._steps:,}", of_scaling,
            extra=event("step_skipped", skipped=self.num_skipped, steps=self._steps, in_a_row=self._skipped_in_a_row),
        )  # fmt: skip


def _is_due(count: int) -> bool:
    """Whether a warning is logged at occurrence number `count`: the 1st, 10th and 100th, then every 1000th."""
    return count in (1, 10, 100) or count % 1000 == 0


def param_namer(optimizer: torch.optim.Optimizer) -> Callable[[int], str]:
    """A function that gives the name of a parameter by its number, and keeps no reference to the optimizer."""
    optimizer_ref = weakref.ref(optimizer)

    def name(param: int) -> str:
        optimizer = optimizer_ref()
        return str(param) if optimizer is None else name_of(optimizer.param_groups, param)

    return name
