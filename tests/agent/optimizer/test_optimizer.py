"""`tidegate.AdamW` as users of torch.optim.AdamW use it, and what it says when it cannot work."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.plain_adamw import PlainAdamW, array
from tidegate.errors import ConfigError, EngineError, KnobError, MemoryBudgetError, ParameterError
from tidegate.knobs.knobs import Knobs

MIXED = tidegate.Offload(stride=2.0, static_ratio=0.25, subgroup_numel=50, emulated=FAST)


def params_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def run_steps(optimizer: Any, params: list[torch.nn.Parameter], first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        backward(params, random_grads(params, step, some=False))
        optimizer.step()


# ---- gradients that change after they were copied early


def test_accumulation_uses_the_sum() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                backward(params, random_grads(params, 10 * step + micro, some=False))
            plain.step([p.grad.clone() for p in params])  # type: ignore[union-attr]
            optimizer.step()
            assert plain.same_weights(params)


def test_clip_grad_norm_from_outside_is_honoured() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        for step in range(4):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            plain.step([p.grad.clone() for p in params])  # type: ignore[union-attr]
            optimizer.step()
            assert plain.same_weights(params)


def test_a_gradient_that_was_replaced_or_assigned_without_autograd() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        backward(params, random_grads(params, 0, some=False))
        grads = random_grads(params, 1, some=False)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_non_finite_gradients_skip_the_step_and_leave_everything_as_it_was() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        for step, poison in enumerate([None, float("inf"), None, float("nan"), None]):
            grads = random_grads(params, step, some=False)
            if poison is not None:
                grads[1].view(-1)[5] = poison  # type: ignore[union-attr]
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)
        assert optimizer.state_dict()["state"][0]["step"] == 3


def test_zero_grad_in_the_middle_of_a_step_starts_it_over() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        backward(params, random_grads(params, 99, some=False))
        optimizer.zero_grad()
        grads = random_grads(params, 1, some=False)
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_channels_last_and_transposed_weights_keep_their_elements_in_place() -> None:
    dense = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)
    params = [torch.nn.Parameter(dense), torch.nn.Parameter(torch.randn(6, 9).t())]
    logical = [p.detach().clone().contiguous() for p in params]
    with tidegate.AdamW(params, lr=0.1, offload=MIXED) as optimizer:
        reference = [torch.nn.Parameter(w) for w in logical]
        other = torch.optim.AdamW(reference, lr=0.1)
        for step in range(3):
            grads = random_grads(reference, step, some=False)
            for mine, theirs, grad in zip(params, reference, grads, strict=True):
                mine.grad, theirs.grad = grad, grad
            optimizer.step()
            other.step()
        for mine, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(mine, theirs)


# ---- weights that the user sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stride", [1.0, 2.0, "off"])
def test_weights_loaded_later_are_not_reverted(dtype: torch.dtype, stride: Any) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    loaded = [torch.full_like(p, 0.5) for p in params]
    offload = tidegate.Offload(stride=stride, static_ratio=0.25, subgroup_numel=50, emulated=FAST)
    with tidegate.AdamW(params, lr=1e-2, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 2)
        with torch.no_grad():
            for p, value in zip(params, loaded, strict=True):
                p.copy_(value)
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        saved = optimizer.state_dict()["state"]
        for i, mine in enumerate(plain.params):
            mine.step = 2
            mine.exp_avg, mine.exp_avg_sq = array(saved[i]["exp_avg"]), array(saved[i]["exp_avg_sq"])
        grads = random_grads(params, 7, some=False)
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


# ---- torch's habits


def test_step_with_closure_returns_the_loss() -> None:
    params = params_of((5,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:

        def closure() -> float:
            optimizer.zero_grad()
            loss = params[0].square().sum()
            loss.backward()
            return loss.item()

        before = params[0].detach().clone()
        assert optimizer.step(closure) == pytest.approx(before.square().sum().item())
        assert not torch.equal(before, params[0])


def test_parameters_without_gradient_frozen_empty_and_scalar_ones() -> None:
    params = [*params_of((30,), (12,)), torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.tensor(2.0))]
    params[1].requires_grad_(False)
    frozen = params[1].clone()
    with tidegate.AdamW(params, lr=0.1, offload=MIXED) as optimizer:
        (params[0].sum() + params[3]).backward()
        optimizer.step()
        assert torch.equal(params[1], frozen)
        assert params[3].item() != 2.0
        assert set(optimizer.state_dict()["state"]) == {0, 3}
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_resumes_bit_for_bit_into_another_plan(dtype: torch.dtype, tmp_path: Any) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    with tidegate.AdamW(params, lr=0.02, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(g) for g in optimizer.param_groups])
        run_steps(optimizer, params, 0, 3)
        torch.save({"weights": params, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    other = [torch.nn.Parameter(w.detach().clone()) for w in saved["weights"]]
    offload = tidegate.Offload(stride="off", static_ratio=0.6, subgroup_numel=31, emulated=FAST)
    with tidegate.AdamW(other, lr=9.0, offload=offload) as resumed:
        resumed.load_state_dict(saved["optimizer"])
        assert resumed.param_groups[0]["lr"] == 0.02
        run_steps(resumed, other, 3, 3)
    for step in range(6):
        plain.step(random_grads(other, step, some=False))
    assert plain.same_weights(other)


def test_what_a_loaded_state_does_not_hold_begins_anew() -> None:
    """As with torch: parameters without saved state have no step and no moments any more."""
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, lr=0.02, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        saved = optimizer.state_dict()
        run_steps(optimizer, params, 2, 1)
        del saved["state"][1]
        optimizer.load_state_dict(saved)
        assert set(optimizer.state_dict()["state"]) == {0}
        fresh = PlainAdamW([{**optimizer.param_groups[0], "params": params[1:]}])
        run_steps(optimizer, params, 3, 2)
    for step in (3, 4):
        fresh.step(random_grads(params, step, some=False)[1:])
    assert fresh.same_weights(params[1:])


def test_state_dict_goes_to_torch_and_back() -> None:
    params = params_of((40, 3), (77,))
    reference = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = torch.optim.AdamW(reference, lr=0.02)
    with tidegate.AdamW(params, lr=0.02, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        run_steps(theirs, reference, 0, 2)
        theirs.load_state_dict(optimizer.state_dict())
        run_steps(optimizer, params, 2, 2)
        run_steps(theirs, reference, 2, 2)
        optimizer.load_state_dict(theirs.state_dict())
        run_steps(optimizer, params, 4, 2)
        run_steps(theirs, reference, 4, 2)
    for mine, other in zip(params, reference, strict=True):
        torch.testing.assert_close(mine, other)


def test_state_of_another_model_is_refused() -> None:
    params, other = params_of((4, 3)), params_of((5, 3))
    with tidegate.AdamW(params, offload=MIXED) as a, tidegate.AdamW(other, offload=MIXED) as b:
        run_steps(a, params, 0, 1)
        with pytest.raises(ConfigError, match="shape"):
            b.load_state_dict(a.state_dict())


# ---- what cannot work is said at once


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: tidegate.AdamW([]), ParameterError, "no parameters"),
        (lambda: tidegate.AdamW(params_of((3,)), lr=-1), ConfigError, "lr=-1"),
        (lambda: tidegate.AdamW(params_of((3,)), betas=(0.9, 1.0)), ConfigError, r"betas\[1\]=1.0"),
        (lambda: tidegate.AdamW(params_of((3,)), max_grad_norm=0), ConfigError, "max_grad_norm=0"),
        (lambda: tidegate.AdamW(params_of((3,), dtype=torch.float64)), ParameterError, "float64.*supported"),
        (lambda: tidegate.AdamW([torch.nn.Parameter(torch.zeros(4, 4)[:, ::2])]), ParameterError, "gaps in memory"),
        (lambda: tidegate.Offload(stride=0.5), KnobError, "stride=0.5 is out of range: a number from 1"),
        (lambda: tidegate.Offload(static_ratio=1.5), KnobError, "static_ratio=1.5 is out of range"),
        (lambda: tidegate.Offload(subgroup_numel=0), ConfigError, "subgroup_numel=0"),
        (lambda: tidegate.Offload(device="tpu"), ConfigError, "device='tpu'"),
    ],
)  # fmt: skip
def test_bad_settings_name_value_and_bound(build: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build()


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_defaults_of_an_optimizer_are_arguments_of_another(decoupled: bool) -> None:
    with (
        tidegate.AdamW(params_of((3,)), lr=0.5, decoupled=decoupled) as one,
        tidegate.AdamW(params_of((3,)), **one.defaults) as other,
    ):
        assert other.defaults == one.defaults
        assert other.param_groups[0]["decoupled_weight_decay"] is decoupled
    with tidegate.AdamW(params_of((3,)), **torch.optim.AdamW(params_of((3,))).defaults) as like_torch:
        assert like_torch.param_groups[0]["decoupled_weight_decay"]


def test_betas_may_be_a_tensor() -> None:
    numbers, tensor = (0.5, 0.75), torch.tensor([0.5, 0.75])
    weights = []
    for betas in (numbers, tensor):
        params = params_of((3,))
        with tidegate.AdamW(params, betas=betas) as optimizer:  # type: ignore[arg-type]
            run_steps(optimizer, params, 0, 2)
        weights.append(params[0].detach())
    assert torch.equal(*weights)
    for wrong, count in ((torch.ones(3) / 2, 3), ((0.5,), 1), (0.5, 1)):
        with pytest.raises(ConfigError, match=f"has {count} numbers: it must have 2"):
            tidegate.AdamW(params_of((3,)), betas=wrong)


def test_sparse_gradients_are_refused_in_backward() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    with (
        tidegate.AdamW(embedding.parameters(), offload=MIXED),
        pytest.raises(ParameterError, match="sparse=False"),
    ):
        embedding(torch.tensor([1, 2])).sum().backward()


def test_copies_and_pickles_are_refused_with_a_reason() -> None:
    with tidegate.AdamW(params_of((3,)), offload=MIXED) as optimizer:
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)


def test_a_closed_optimizer_says_so() -> None:
    params = params_of((3,))
    optimizer = tidegate.AdamW(params, offload=MIXED)
    optimizer.close()
    params[0].grad = torch.ones(3)
    with pytest.raises(EngineError, match="closed"):
        optimizer.step()


def test_a_forked_child_cannot_step_and_the_parent_goes_on() -> None:
    params = params_of((40,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        params[0].grad = torch.ones(40)
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except EngineError as error:
                os._exit(7 if "forked child" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        run_steps(optimizer, params, 1, 1)


def test_knobs_that_do_not_fit_the_device_are_refused_with_figures() -> None:
    params = params_of((1000,))
    offload = tidegate.Offload(
        stride="off", subgroup_numel=100, emulated=FAST, device_memory_bytes=2 * 4000 + 3 * 1024, headroom_bytes=0
    )
    with tidegate.AdamW(params, offload=offload) as optimizer:
        optimizer.check_knobs(Knobs(stride="off", static_ratio=0.3))
        with pytest.raises(MemoryBudgetError, match=r"residents need 8,000 bytes.*3,072 of 11,072.*up to 0.38 fits"):
            optimizer.check_knobs(Knobs(stride="off", static_ratio=1.0))
    with pytest.raises(MemoryBudgetError):
        tidegate.AdamW(
            params_of((1000,)),
            offload=tidegate.Offload(static_ratio=1.0, subgroup_numel=100, emulated=FAST, device_memory_bytes=11_072),
        )
