"""Parameters that come, go and change places in `param_groups` by other ways than `add_param_group`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.background import update_in_background
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import ParameterError

RELEASING = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients="release")
SHAPES = ((40, 3), (77,), (30,))


def train(optimizer: tidegate.AdamW, params: list[Any], plain: PlainAdamW, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        grads = random_grads(params, step, some=False)
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def plain_of(optimizer: tidegate.AdamW) -> PlainAdamW:
    return PlainAdamW([{**group, "params": list(group["params"])} for group in optimizer.param_groups])


@pytest.mark.parametrize("offload", [MIXED, RELEASING], ids=["keep", "release"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_that_change_groups_while_training_keep_their_state(
    dtype: torch.dtype, offload: tidegate.Offload
) -> None:
    params = params_of(*SHAPES, dtype=dtype)
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    with tidegate.AdamW(groups, offload=offload) as optimizer:
        plain = plain_of(optimizer)
        train(optimizer, params, plain, 0)
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop(0))
        plain.groups, plain.params = plain_of(optimizer).groups, [plain.params[i] for i in (1, 2, 0)]
        train(optimizer, [params[i] for i in (1, 2, 0)], plain, 5)
        assert optimizer.steps == (4, 4, 4)
        assert set(optimizer.state) == set(params)


def test_a_parameter_that_is_appended_to_a_group_begins_at_nothing() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params[:2], offload=MIXED) as optimizer:
        run_steps(optimizer, params[:2], 0, 2)
        optimizer.param_groups[0]["params"].append(params[2])
        run_steps(optimizer, params, 2, 2)
        assert optimizer.steps == (4, 4, 2)


def test_a_parameter_that_leaves_is_no_longer_updated_and_its_state_goes(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        gone = optimizer.param_groups[0]["params"].pop(1)
        before = gone.detach().clone()
        with caplog.at_level(logging.WARNING, "tidegate"):
            run_steps(optimizer, params, 2, 2)
        assert torch.equal(gone, before)
        assert optimizer.steps == (4, 4)
        assert gone not in optimizer.state
        (said,) = [record.getMessage() for record in caplog.records]
        assert "1 of 3 parameters (from parameter 1 on)" in said
        with tidegate.AdamW([gone], offload=MIXED) as other:
            run_steps(other, [gone], 0, 1)


def test_an_exchange_of_all_after_the_first_step_is_refused_by_name() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        optimizer.param_groups[0]["params"][:] = params_of(*SHAPES)
        with pytest.raises(ParameterError, match=r"Parameter 0 of param group 0 is not the parameter that"):
            optimizer.step()
        optimizer.param_groups[0]["params"][:] = params
        run_steps(optimizer, params, 1, 1)


@pytest.mark.parametrize("offload", [MIXED, RELEASING], ids=["keep", "release"])
@pytest.mark.parametrize("shape", [(77,), (5, 4)], ids=["same shape", "other shape"])
def test_a_new_head_begins_at_nothing_and_all_others_keep_their_state(
    shape: tuple[int, ...], offload: tidegate.Offload, caplog: pytest.LogCaptureFixture
) -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        plain = plain_of(optimizer)
        train(optimizer, params, plain, 0)
        (head,) = params_of(shape)
        left, params[1] = params[1], head
        optimizer.param_groups[0]["params"][1] = head
        fresh = plain_of(optimizer)
        plain.groups, plain.params[1] = fresh.groups, fresh.params[1]
        before = left.detach().clone()
        with caplog.at_level(logging.WARNING, "tidegate"):
            train(optimizer, params, plain, 5)
        assert torch.equal(left, before)
        assert optimizer.steps == (4, 2, 4)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "1 of 3 parameters (from parameter 1 on)" in said
        assert "(1) begin at step 0" in said


def test_a_first_step_that_is_skipped_leaves_parameters_free_to_be_exchanged() -> None:
    old, new = params_of(*SHAPES), params_of((20, 3), (38,), (15,))
    with tidegate.AdamW(old, offload=MIXED) as optimizer:
        backward(old, [torch.full_like(param, float("nan")) for param in old])
        optimizer.step()
        assert optimizer.num_skipped == 1
        optimizer.param_groups[0]["params"] = list(new)
        train(optimizer, new, plain_of(optimizer), 0)


@pytest.mark.parametrize("offload", [MIXED, RELEASING], ids=["keep", "release"])
def test_an_exchange_before_the_first_step_trains_the_new_ones(offload: tidegate.Offload) -> None:
    old, new = params_of(*SHAPES), params_of((20, 3), (38,), (15,))
    with tidegate.AdamW(old, offload=offload) as optimizer:
        run_nothing(optimizer)
        optimizer.param_groups[0]["params"] = list(new)
        train(optimizer, new, plain_of(optimizer), 0)


def run_nothing(optimizer: tidegate.AdamW) -> None:
    """What Accelerate does when it prepares an optimizer."""
    optimizer.load_state_dict(optimizer.state_dict())


def test_gradients_that_were_released_cannot_change_groups() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=RELEASING) as optimizer:
        run_steps(optimizer, params, 0, 1)
        optimizer.zero_grad()
        backward(params, random_grads(params, 1, some=False))
        optimizer.param_groups[0]["params"].reverse()
        with pytest.raises(ParameterError, match=r"put into another param group, after a backward.*zero_grad\(\)"):
            optimizer.step()


def test_state_on_storage_paths_cannot_change_groups(tmp_path: Path) -> None:
    params = params_of(*SHAPES)
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 1)
        optimizer.param_groups[0]["params"].reverse()
        with pytest.raises(ParameterError, match="storage paths cannot be transferred"):
            optimizer.step()
        optimizer.param_groups[0]["params"].reverse()
        run_steps(optimizer, params, 1, 1)


def test_while_an_update_goes_on_in_the_background() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        update_in_background(optimizer)
        plain = plain_of(optimizer)
        for step in range(4):
            grads = random_grads(params, step, some=False)
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            if step == 1:
                optimizer.param_groups[0]["params"].append(extra := params_of((5,))[0])
        optimizer.wait()
        assert plain.same_weights(params)
        assert optimizer.steps == (4, 4, 4, 0)
        assert extra not in optimizer.state


def test_gradients_of_the_backward_that_finds_it_out_are_those_of_the_right_parameters() -> None:
    """Hooks know parameters by the numbers that they had."""
    params = params_of(*SHAPES)
    summing = tidegate.Offload(
        stride=2.0, subgroup_numel=50, emulated=FAST, gradients="release", accumulation="host"
    )  # fmt: skip
    with tidegate.AdamW(params, offload=summing) as optimizer:
        plain = plain_of(optimizer)
        train(optimizer, params, plain, 0)
        optimizer.param_groups[0]["params"].reverse()
        params.reverse()
        plain.params.reverse()
        first, second = (random_grads(params, step, some=False) for step in (5, 6))
        optimizer.zero_grad()
        with optimizer.accumulate():
            backward(params, first)
        backward(params, second)
        optimizer.step()
        plain.step([a + b for a, b in zip(first, second, strict=True)])  # type: ignore[operator]
        assert plain.same_weights(params)
