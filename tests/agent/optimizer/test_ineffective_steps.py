"""Steps that change no weight are counted and said: gradients that are not finite, and none at all."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps

RELEASING = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients="release")


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tidegate")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def step_with(optimizer: tidegate.AdamW, params: list[Any], *poisoned: int) -> None:
    grads = random_grads(params, 1, some=False)
    for number in poisoned:
        grads[number][0] = float("nan")  # type: ignore[index]
    optimizer.zero_grad()
    backward(params, grads)
    optimizer.step()


@pytest.mark.parametrize("offload", [MIXED, RELEASING], ids=["keep", "release"])
def test_the_first_and_the_tenth_skipped_step_are_said_with_count_parameter_and_remedy(
    offload: tidegate.Offload, caplog: pytest.LogCaptureFixture
) -> None:
    params = params_of((40, 3), (77,), (30,))
    named = [(f"layers.{i}.weight", param) for i, param in enumerate(params)]
    with tidegate.AdamW(named, offload=offload) as optimizer:
        step_with(optimizer, params)
        assert optimizer.num_skipped == 0
        step_with(optimizer, params, 1)
        (first,) = said(caplog)
        assert "parameter layers.1.weight is not finite" in first
        assert "1. skipped step of 2" in first
        assert "max_grad_norm" in first
        for _ in range(8):
            step_with(optimizer, params, 0, 2)
        assert len(said(caplog)) == 1
        step_with(optimizer, params, 0, 2)
        assert "layers.0.weight and of 1 more are not finite" in said(caplog)[1]
        assert "10. skipped step of 11" in said(caplog)[1]
        assert optimizer.num_skipped == 10
        event = vars(caplog.records[1])
        assert (event["event"], event["fields"]) == ("step_skipped", {"skipped": 10, "steps": 11, "in_a_row": 10})


def test_a_grad_scaler_may_look_for_its_scale(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of((40, 3), (77,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=0.5)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        for step in range(12):
            optimizer.zero_grad()
            grads = random_grads(params, step, some=False)
            grads[0][0] = float("inf")  # type: ignore[index]
            scaler.scale(torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert len(said(caplog)) == (step >= 9)
        assert "init_scale" in said(caplog)[0]
        assert optimizer.num_skipped == 12


def step_without(optimizer: tidegate.AdamW, params: list[Any], *left_out: int, step: int = 1) -> None:
    grads = random_grads(params, step, some=False)
    optimizer.zero_grad()
    backward(params, [None if number in left_out else grad for number, grad in enumerate(grads)])
    optimizer.step()


@pytest.mark.parametrize("offload", [MIXED, RELEASING], ids=["keep", "release"])
def test_parameters_that_never_have_a_gradient_are_said_once(
    offload: tidegate.Offload, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that was replaced, or blocks that were sharded behind the optimizer's back, while the rest is trained."""
    params = params_of((40, 3), (77,), (30,), (5,), (0, 3))
    params[3].requires_grad_(False)
    named = [(f"layers.{i}.weight", param) for i, param in enumerate(params)]
    with tidegate.AdamW(named, offload=offload) as optimizer:
        for step in range(19):
            step_without(optimizer, params, 1, 2, 3)
            if step == 4:
                optimizer.zero_grad()
                params[0].backward(torch.full_like(params[0], float("nan")))
                optimizer.step()
        assert len(said(caplog)) == 1  # the one with NaN
        step_without(optimizer, params, 1, 2, 3)
        assert "2 of the optimizer's 5 parameters (the first: layers.1.weight)" in said(caplog)[1]
        assert "had no gradient in 20 steps" in said(caplog)[1]
        assert "build the optimizer again" in said(caplog)[1]
        event = vars(caplog.records[1])
        assert (event["event"], event["fields"]) == ("untrained", {"parameters": 2, "steps": 20})
        optimizer.add_param_group({"params": [("head", params_of((6,))[0])]})
        for _ in range(25):
            step_without(optimizer, params, 1, 2, 3)
        assert len(said(caplog)) == 2


def test_parameters_that_have_a_gradient_now_and_then_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of((40, 3), (77,), (30,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        for step in range(25):
            step_without(optimizer, params, *{0, 1, 2} - {step % 19 // 3 % 3}, step=step)
        assert not said(caplog)
        optimizer.add_param_group({"params": params_of((6,))})
        for step in range(20):
            step_without(optimizer, params, step=step)
        assert "1 of the optimizer's 4 parameters (the first: 0 of param group 1)" in said(caplog)[0]


def test_a_model_whose_parameters_were_exchanged_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """As after `fully_shard(model)` behind the optimizer's back: the optimizer's parameters get no gradients."""
    params, others = params_of((40, 3), (77,)), params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        for step in range(2):
            backward(others, random_grads(others, step, some=False))
            optimizer.step()
        assert not said(caplog)
        for step in range(2, 11):
            backward(others, random_grads(others, step, some=False))
            optimizer.step()
        (first,) = said(caplog)
        assert "no gradient on any of the 2 parameters, 3 times in a row" in first
        assert "accelerator.prepare()" in first
        run_steps(optimizer, params, 0, 1)
        optimizer.zero_grad()
        optimizer.step()
        assert len(said(caplog)) == 1
