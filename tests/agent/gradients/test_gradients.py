"""Gradients: kept or released, changed through `.data`, accumulated in fp32, spilled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda, FakeStream
from tests.agent.devices.fake_training import fake_training
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_awkward_moments import copied_early, grads_of, plain_of
from tests.agent.optimizer.test_optimizer import params_of, run_steps
from tests.services import until
from tidegate.agent.devices.base import GradRef
from tidegate.agent.devices.cuda_runtime import Norms
from tidegate.agent.engine import engine
from tidegate.agent.parameters.fingerprint import Fingerprints, sample_view
from tidegate.errors import EngineError, ParameterError
from tidegate.kernels import GradDtype
from tidegate.kernels.arithmetic import oracle
from tidegate.knobs.knobs import Knobs

KEPT = tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST)
RELEASED = tidegate.Offload(stride=2.0, static_ratio=0.2, subgroup_numel=50, emulated=FAST, gradients="release")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10")
def test_the_largest_released_gradient_counts_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    (small,) = params_of((77,), dtype=torch.bfloat16)
    (large,) = params_of((40, 30), dtype=torch.bfloat16)
    large.grad_dtype = torch.float32
    with tidegate.AdamW([small], offload=RELEASED) as optimizer:
        reserved: list[int] = []
        budget = optimizer.engine.planner.budget
        needed = budget._weight_and_gradient_bytes
        monkeypatch.setattr(
            budget, "_weight_and_gradient_bytes",
            lambda layouts: reserved.append(needed(layouts)) or reserved[-1],  # type: ignore[func-returns-value]
        )  # fmt: skip
        optimizer.check_knobs(optimizer.knobs)
        optimizer.add_param_group({"params": [large]})
        assert reserved[:2] == [77 * 2 + 77 * 2, (77 + 1200) * 2 + 1200 * 4]


# ---- changed through .data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_changed_through_data_after_they_were_copied(dtype: torch.dtype) -> None:
    params = params_of((40, 3), (77,), (300,), dtype=dtype)
    with tidegate.AdamW(params, offload=KEPT) as optimizer:
        plain = plain_of(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            copied_early(optimizer, len(optimizer.engine.layouts))
            params[step % 3].grad.data.clamp_(-0.5, 0.5)  # type: ignore[union-attr]
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stride", ["off", 1.0])
@pytest.mark.parametrize("when", ["before the backward", "before the step"])
def test_weights_changed_through_data_are_not_reverted(dtype: torch.dtype, stride: Any, when: str) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    offload = tidegate.Offload(stride=stride, subgroup_numel=50, emulated=FAST)
    with tidegate.AdamW(params, lr=0.1, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 2)
        optimizer.zero_grad()
        if when == "before the step":
            backward(params, random_grads(params, 5, some=False))
        for param in params:
            param.data.mul_(0.25)
        # All remainders and masters begin anew: the oracle does so when it is built from the weights.
        plain = plain_of(optimizer)
        for mine, state in zip(plain.params, optimizer_state(optimizer, when), strict=True):
            mine.exp_avg[:], mine.exp_avg_sq[:], mine.step = state
        if when == "before the backward":
            backward(params, random_grads(params, 5, some=False))
        plain.step(grads_of(params))
        optimizer.step()
        assert plain.same_weights(params)


def optimizer_state(optimizer: tidegate.AdamW, when: str) -> list[tuple[Any, Any, int]]:
    """Moments and steps. Asking for them drops early copies, which are made again at step()."""
    states = optimizer.state_dict()["state"].values()
    return [(s["exp_avg"].flatten().numpy(), s["exp_avg_sq"].flatten().numpy(), int(s["step"])) for s in states]


def test_samples_show_every_change_of_a_whole_tensor() -> None:
    tensors = {i: torch.randn(n) for i, n in enumerate([1, 2, 31, 32, 33, 64, 100, 5000])}
    prints = Fingerprints()
    prints.set_tensors(tensors)
    assert prints.changed() == set()
    for key, tensor in tensors.items():
        tensor.data.mul_(1.5)
        assert prints.changed() == {key}
        prints.save_reference()
        assert prints.changed() == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_bits_so_that_nan_is_not_a_change(dtype: torch.dtype) -> None:
    tensor = torch.full((100,), float("nan"), dtype=dtype)
    assert 32 <= len(sample_view(tensor)) <= 64
    prints = Fingerprints()
    prints.set_tensors({0: tensor})
    assert prints.changed() == set()


# ---- accumulation


@pytest.mark.parametrize("mode", ["keep", "release"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_accumulate_in_fp32_where_the_user_asks_for_it(mode: Any, dtype: torch.dtype) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    for param in params:
        param.grad_dtype = torch.float32
    offload = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients=mode, gradient_memory_bytes=1)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            first, second = random_grads(params, step, some=False), random_grads(params, step + 50, some=False)
            with optimizer.accumulate():
                backward(params, first)
            backward(params, second)
            optimizer.step()
            plain.step([a.float() + b.float() for a, b in zip(first, second, strict=True)])  # type: ignore[union-attr]
            assert plain.same_weights(params)


# ---- released


def test_released_gradients_give_their_memory_back_before_the_step() -> None:
    params = params_of((5000,), (5000,), (5000,))
    offload = tidegate.Offload(stride="off", subgroup_numel=5000, emulated=FAST, gradients="release")
    with tidegate.AdamW(params, offload=offload) as optimizer:
        before = optimizer.device.in_use_bytes
        backward(params, random_grads(params, 0, some=False))
        gradients, routing = optimizer.engine.gradients, optimizer.engine.routing

        def released() -> list[Any]:
            routing.release_read()
            return gradients._current

        until(lambda: released() == [None] * 3, "squares and copies of all three")
        until(lambda: optimizer.device.in_use_bytes == before, "the memory of the last one")
        optimizer.step()
        assert [p.grad for p in params] == [None] * 3


def test_spilled_gradients_leave_the_device_and_return_with_their_state() -> None:
    params = params_of(*[(500,)] * 6)
    offload = tidegate.Offload(
        stride=1.0, subgroup_numel=500, emulated=FAST, gradients="release", gradient_memory_bytes=2 * 2000
    )
    with tidegate.AdamW(params, offload=offload) as optimizer:
        results: list[Any] = []
        optimizer.observers.append(lambda result, _: results.append(result))
        run_steps(optimizer, params, 0, 1)
        assert [p.spilled for p in results[0].plan.placements] == [False, False, True, True, True, True]
        spilled = [span for span in results[0].spans if span.kind.value == "grad_h2d"]
        assert sorted(span.subgroup for span in spilled) == [2, 3, 4, 5]
        assert {span.nbytes for span in spilled} == {2000}


@pytest.mark.parametrize(
    "use",
    [
        lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
        lambda params: torch.nn.utils.clip_grad_value_(params, 1.0),
        lambda params: params[0].grad.norm(),
        lambda params: params[0].grad.data.mul_(2),
        lambda params: params[0].grad.zero_(),
        lambda params: setattr(params[0].grad, "data", torch.ones(40, 3)),
        lambda params: params[0].grad.set_(torch.ones(40, 3)),
        lambda params: (params[0] * 2).sum().backward(),
    ],
)
def test_who_uses_a_released_gradient_is_told_so(use: Any) -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        with pytest.raises(ParameterError, match=r"max_grad_norm.*accumulate"):
            use(params)
        assert "ReleasedGradient(shape=(77,)" in repr(params[1].grad)
        # Nothing is lost: the step still has its gradients.
        optimizer.step()
        run_steps(optimizer, params, 1, 1)


def test_gradients_dropped_by_the_model_before_the_step_do_not_count() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        plain = plain_of(optimizer)
        grads = random_grads(params, 0, some=False)
        backward(params, grads)
        params[0].grad = None
        optimizer.step()
        plain.step([None, grads[1]])
        assert plain.same_weights(params)


def test_a_backward_after_gradients_were_dropped_behind_our_back_is_refused() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        plain = plain_of(optimizer)
        backward(params, random_grads(params, 0, some=False))
        for param in params:
            param.grad = None
        with pytest.raises(ParameterError, match=r"optimizer\.zero_grad"):
            backward(params, random_grads(params, 1, some=False))
        optimizer.zero_grad()
        grads = random_grads(params, 2, some=False)
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_zero_grad_drops_released_gradients() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            backward(params, random_grads(params, 100 + step, some=False))
            optimizer.zero_grad(set_to_none=step == 1)
            grads = random_grads(params, step, some=False)
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda optimizer: optimizer.state_dict(), r"have been released.*Call step\(\) first"),
        (lambda optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}), "released"),
        (lambda optimizer: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]}), "released"),
    ],
)
def test_what_would_lose_released_gradients_is_refused(do: Any, says: str) -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        plain = plain_of(optimizer)
        grads = random_grads(params, 0, some=False)
        backward(params, grads)
        with pytest.raises(EngineError, match=says):
            do(optimizer)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_weights_edited_between_backward_and_step_are_refused_when_released() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        with torch.no_grad():
            params[1].add_(1.0)
        with pytest.raises(EngineError, match="Parameter 1 was edited"):
            optimizer.step()
        optimizer.zero_grad()
        plain = plain_of(optimizer)
        grads = random_grads(params, 1, some=False)
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_knobs_changed_between_backward_and_step_wait_for_the_next_one_when_released() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=RELEASED) as optimizer:
        seen: list[Any] = []
        optimizer.observers.append(lambda result, _: seen.append(result.effective.stride))
        backward(params, random_grads(params, 0, some=False))
        optimizer.apply_knobs(Knobs(stride="off", static_ratio=0.0))
        optimizer.step()
        run_steps(optimizer, params, 1, 1)
        assert seen == [2.0, "off"]


@pytest.mark.parametrize("seed", range(6))
def test_the_norm_does_not_depend_on_how_gradients_came(seed: int) -> None:
    params = params_of(*[(30 + i,) for i in range(40)])
    grads = [g for g in random_grads(params, seed, some=False) if g is not None]
    seen: list[float | None] = []
    for offload, order in itertools.product((KEPT, RELEASED), (range(40), range(39, -1, -1))):
        same = [torch.nn.Parameter(p.detach().clone()) for p in params]
        with tidegate.AdamW(same, offload=offload) as optimizer:
            optimizer.observers.append(lambda result, _: seen.append(result.grad_norm))
            for i in order:
                (same[i] * grads[i]).sum().backward()
            optimizer.step()
    # In another order most of these seeds give another number.
    assert seen == [sum((oracle.sum_of_squares(g.numpy(), GradDtype.F32)[0] for g in grads), 0.0) ** 0.5] * 4


def test_sums_of_squares_are_fetched_once_for_each_subgroup_not_for_each_parameter() -> None:
    class Counting(FakeCuda):
        fetched = 0

        def norms(self, grads: Sequence[GradRef], stream: FakeStream) -> Callable[[], Norms]:
            read = super().norms(grads, stream)

            def counted() -> Norms:
                self.fetched += len(grads)
                return read()

            return counted

    fake, params = Counting(), params_of(*[(5,)] * 40)
    released: dict[str, Any] = {"stride": "off", "subgroup_numel": 100, "gradients": "release"}
    with fake_training(fake, params, **released) as training:
        training.train(random_grads(params, 0, some=False))
        # NORM asks for them, and whoever asks for the times of the ops.
        assert fake.fetched <= 2 * len(params)
        training.forward()


def test_an_update_is_a_change_that_autograd_knows_of() -> None:
    params = params_of((30,))
    with tidegate.AdamW(params, offload=KEPT) as optimizer:
        squares = params[0].square().sum()  # its backward reads the weight as it is now
        run_steps(optimizer, params, 0, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()


def test_backward_without_step_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_DROPPED_SPANS", 40)
    params = params_of((300,))
    with tidegate.AdamW(params, offload=KEPT) as optimizer:
        for step in range(20):
            backward(params, random_grads(params, step, some=False))
            copied_early(optimizer, 6)
            optimizer.zero_grad()
        assert len(optimizer.engine._dropped) == 40


# ---- memory that autograd shares between gradients


@pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="an older torch without CUDA: not needed there")
def test_a_released_gradient_is_not_in_memory_that_autograd_adds_to() -> None:
    """The gradient of `query` is a view of the one that waits for `x`, which gets a second part later."""
    query = torch.nn.Parameter(torch.randn(16, 8))
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with tidegate.AdamW([query, *first.parameters(), *second.parameters()], offload=RELEASED) as optimizer:
        gradients, taken, whole = optimizer.engine.gradients, dict[int, int](), list[int]()
        accumulated = gradients.accumulated

        def observed(param: int) -> tuple[int, ...]:
            ready = accumulated(param)
            taken[param] = gradients.reference(param).address
            return ready

        gradients.accumulated = observed  # type: ignore[method-assign]
        arrived: dict[int, int] = {}
        for number, param in enumerate((query, *first.parameters(), *second.parameters())):
            note = lambda grad, number=number: arrived.__setitem__(number, grad.data_ptr())  # noqa: E731
            param.register_hook(note)
        x = first(torch.randn(1, 16, 8))
        x.register_hook(lambda grad: whole.append(grad.data_ptr()))
        late = second(x).sum()  # made first, so that its backward runs last
        y = x + query.unsqueeze(0)
        (y.square().sum() + late).backward()
        assert taken[0] != arrived[0]
        assert taken[0] not in whole
        assert {number for number in taken if taken[number] == arrived[number]} >= {1, 3}, "others are not copied"
