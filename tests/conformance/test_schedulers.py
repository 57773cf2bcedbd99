"""Every scheduler of torch drives ours as it drives torch's AdamW: the same rates, the same betas, the same weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from tests.conformance.beside_torch import BesideTorch

STEPS = 12

Build = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULERS: dict[str, Build] = {
    "LambdaLR": partial(LambdaLR, lr_lambda=[lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": partial(MultiplicativeLR, lr_lambda=[lambda _: 0.9, lambda step: 1 + 0.01 * step]),
    "StepLR": partial(StepLR, step_size=4),
    "MultiStepLR": partial(MultiStepLR, milestones=[2, 5, 9], gamma=0.3),
    "ConstantLR": partial(ConstantLR, factor=0.1, total_iters=4),
    "LinearLR": partial(LinearLR, start_factor=0.1, total_iters=6),
    "ExponentialLR": partial(ExponentialLR, gamma=0.8),
    "PolynomialLR": partial(PolynomialLR, total_iters=8, power=2.0),
    "CosineAnnealingLR": partial(CosineAnnealingLR, T_max=5, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": partial(CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "CyclicLR": partial(CyclicLR, base_lr=1e-4, max_lr=1e-2, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": partial(OneCycleLR, max_lr=[1e-2, 5e-2], total_steps=STEPS + 1),
    "ReduceLROnPlateau": partial(ReduceLROnPlateau, patience=1, factor=0.5),
    "SWALR": partial(SWALR, swa_lr=1e-4, anneal_epochs=5),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), ExponentialLR(optimizer, 0.9)], milestones=[4]
    ),
    "ChainedScheduler": lambda optimizer: ChainedScheduler([ExponentialLR(optimizer, 0.9), StepLR(optimizer, 3)]),
}
MOVE_BETAS = ("CyclicLR", "OneCycleLR")


def test_every_scheduler_is_here() -> None:
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, member in vars(module).items()
        if inspect.isclass(member) and issubclass(member, LRScheduler) and not name.endswith("LRScheduler")
    }
    assert found == set(SCHEDULERS)


@pytest.mark.parametrize("lr", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_betas_and_weights_follow(name: str, lr: str) -> None:
    rate: Any = 1e-3 if lr == "float" else torch.tensor(1e-3)
    with BesideTorch("AdamW", {"lr": 5e-3, "weight_decay": 0.3}, lr=rate) as both:
        build = SCHEDULERS[name]
        ours, theirs = build(both.optimizer), build(both.reference)
        rates, betas = set(), set()
        for step in range(STEPS):
            both.step()
            both.check()
            for scheduler in (ours, theirs):
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(max(5 - step, 2))  # a loss that stops falling
                else:
                    scheduler.step()
            for group, expected in zip(both.optimizer.param_groups, both.reference.param_groups, strict=True):
                assert type(group["lr"]) is type(expected["lr"])
                assert group["lr"] == expected["lr"]
                assert group["betas"] == expected["betas"]
            rates.add(float(both.optimizer.param_groups[1]["lr"]))
            betas.add(both.optimizer.param_groups[1]["betas"][0])
        assert len(rates) > 1
        assert (len(betas) > 1) is (name in MOVE_BETAS)


def test_a_scheduler_resumes_with_its_optimizer() -> None:
    """From a checkpoint in the middle: as if there had been none."""
    with BesideTorch("AdamW", {"lr": 5e-3}, lr=1e-3) as both:
        ours, theirs = (OneCycleLR(optimizer, 1e-2, total_steps=20) for optimizer in (both.optimizer, both.reference))
        for step in range(10):
            both.step()
            ours.step()
            theirs.step()
            if step == 4:
                saved = copy.deepcopy((both.optimizer.state_dict(), ours.state_dict()))
                both.restart()
                ours = OneCycleLR(both.optimizer, 1e-2, total_steps=20)
                both.optimizer.load_state_dict(saved[0])
                ours.load_state_dict(saved[1])
            both.check()
            assert ours.get_last_lr() == theirs.get_last_lr()
