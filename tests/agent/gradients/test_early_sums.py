"""Squares of gradients that are summed as gradients arrive: the norm is that of the gradients in `step()`."""

from __future__ import annotations

import time

import pytest
import torch

import tidegate
from tidegate.plan.ops import OpKind
from tidegate.plan.plan import Plan


def train(steps: int, clips: bool, gradients: str = "keep", micro_batches: int = 1) -> tuple[list[float], list[Plan]]:
    """Gradient norms, and the plans of the steps. clips: whether the script clips all gradients after the backward."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 10))
    norms: list[float] = []
    plans: list[Plan] = []
    offload = tidegate.Offload(subgroup_numel=200, stride=2.0, gradients=gradients)
    with tidegate.AdamW(model.parameters(), lr=0.01, offload=offload) as optimizer:
        optimizer.observers.append(lambda result, _: (plans.append(result.plan), norms.append(result.grad_norm or 0.0)))
        for _ in range(steps):
            for _ in range(micro_batches):
                model(torch.randn(5, 20)).square().sum().backward()
            if clips:
                time.sleep(0.02)  # all gradients are summed
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
    return norms, plans


def sums_early(plan: Plan) -> bool:
    return bool(list(plan.of_kind(OpKind.GRAD_NORM)))


def test_sums_of_gradients_that_stay_are_made_as_they_arrive() -> None:
    norms, plans = train(3, clips=False)
    assert all(map(sums_early, plans))
    assert norms == train(3, clips=False, gradients="release")[0]


def test_a_script_that_clips_all_gradients_has_its_squares_summed_once() -> None:
    norms, plans = train(6, clips=True)
    assert [sums_early(plan) for plan in plans] == [True] * 3 + [False] * 3
    assert norms == pytest.approx([0.5] * 6, rel=1e-4)


def test_micro_batches_do_not_count_as_changes_by_the_script() -> None:
    _, plans = train(5, clips=False, micro_batches=3)
    assert all(map(sums_early, plans))
