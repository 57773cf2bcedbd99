"""Steps that change no weight, counted and said ever more rarely; and parameters that no step changes, said once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import torch

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.parameters.shards import shard_of
from tidegate.logs import event

log = logging.getLogger("tidegate")

SCALERS_PATIENCE = 10
"""A GradScaler begins with a scale that is too large, and finds a smaller one by skipping a few steps."""
WITHOUT_GRADIENTS_PATIENCE = 3
"""Some scripts call `step()` once before they train, for a scheduler."""
UNTRAINED_PATIENCE = 20
"""Updates in which each part of a model should have had a gradient once."""


class Fruitless:
    """`name`: what a parameter is called, by its number."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self.num_skipped = 0
        """Steps that were skipped because gradients were not finite."""
        self._name = name
        self._steps = 0
        self._skipped_in_a_row = 0
        self._empty_in_a_row = 0
        self._untrained: set[int] = set()
        """Parameters without an update since the watch began; empty when nobody watches."""
        self._updates = 0
        self._said_untrained = False

    def watch(self, num_params: int) -> None:
        """The optimizer has so many parameters from now on: each should be updated once in the next steps."""
        self._untrained = set() if self._said_untrained else set(range(num_params))
        self._updates = 0

    def updated(self, numbers: Collection[int], params: Sequence[torch.Tensor]) -> None:
        """A step updates those of `params` that have these numbers."""
        if not self._untrained:
            return
        self._untrained.difference_update(numbers)
        self._updates += 1
        if self._updates < UNTRAINED_PATIENCE:
            return
        left = [i for i in sorted(self._untrained) if params[i].requires_grad and shard_of(params[i]).numel()]
        self._untrained = set()
        if left:
            self._said_untrained = True
            log.warning(
                "%d of the optimizer's %d parameters (the first: %s) had no gradient in %d steps and are not trained: "
                "that is fine where they are unused, or frozen otherwise than by requires_grad=False. Where a part of "
                "the model was replaced or sharded after the optimizer was built (a new head, fully_shard), build the "
                "optimizer anew from the model's parameters.",
                len(left), len(params), self._name(left[0]), self._updates,
                extra=event("untrained", parameters=len(left), steps=self._updates),
            )  # fmt: skip

    def observe(self, result: StepResult, _: StepPhases) -> None:
        """A step has ended."""
        self._steps += 1
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        if result.scaled:
            patience_ended = self._skipped_in_a_row >= SCALERS_PATIENCE
            if patience_ended and _is_due(self._skipped_in_a_row - SCALERS_PATIENCE + 1):
                self._warn(result.bad_params, "The GradScaler's scale falls all the while: look at its init_scale.")
        elif _is_due(self.num_skipped):
            self._warn(result.bad_params, "In fp16, scale the loss with a GradScaler, or train in bf16.")

    def had_gradients(self, num_params: int, any_gradient: bool) -> None:
        """`step()` was called, with gradients or without any."""
        self._empty_in_a_row = 0 if any_gradient else self._empty_in_a_row + 1
        count = self._empty_in_a_row - WITHOUT_GRADIENTS_PATIENCE + 1
        if count > 0 and _is_due(count):
            log.warning(
                "step() found no gradient on any of the %d parameters, %d times in a row: nothing is trained. If the "
                "loss has a backward, the model has other parameters than the optimizer: they were exchanged after it "
                "was built (fully_shard, a wrapper, another model). Build the optimizer from the model that is "
                "trained, or give both to accelerator.prepare() together. The first of its parameters is %s.",
                num_params, self._empty_in_a_row, self._name(0),
                extra=event("no_gradients", steps=self._empty_in_a_row),
            )  # fmt: skip

    def _warn(self, bad_params: tuple[int, ...], of_scaling: str) -> None:
        if not bad_params:
            where = "a gradient on another rank, or one that the GradScaler looked at, is"
        elif len(bad_params) == 1:
            where = f"the gradient of parameter {self._name(bad_params[0])} is"
        else:
            where = f"the gradients of parameter {self._name(bad_params[0])} and of {len(bad_params) - 1} more are"
        log.warning(
            "A step was skipped, weights and state are as they were: %s not finite (NaN or infinite). It is the %s "
            "skipped step of %s. Look at the loss and the batch of this step, and at the learning rate; clip with "
            "max_grad_norm. torch.autograd.set_detect_anomaly(True) names the operation that made them. %s",
            where, f"{self.num_skipped:,}.", f"{self._steps:,}", of_scaling,
            extra=event("step_skipped", skipped=self.num_skipped, steps=self._steps, in_a_row=self._skipped_in_a_row),
        )  # fmt: skip


def _is_due(count: int) -> bool:
    """The first, the tenth, the hundredth, then every thousandth."""
    return count in (1, 10, 100) or count % 1000 == 0
