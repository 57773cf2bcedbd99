"""Whatever is done to `.grad` between the backward and `step()` counts, though copies of it were made early."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda
from tests.agent.devices.fake_training import FakeTraining, fake_training
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_awkward_moments import copied_early, grads_of, plain_of, slow_copies
from tests.agent.optimizer.test_optimizer import params_of
from tidegate.errors import ParameterError
from tidegate.plan.ops import OpKind

SHAPES = ((24, 24), (77,), (24, 24), (300,), (40, 3))
Grads = list[torch.Tensor]


def of(params: list[torch.nn.Parameter]) -> Grads:
    return [grad for param in params if (grad := param.grad) is not None]


def swap(grads: Grads) -> None:
    one, other = grads[0].data, grads[2].data
    grads[0].data, grads[2].data = other, one


def share(grads: Grads) -> None:
    """The mean of two gradients, in the memory of one."""
    grads[0].data.add_(grads[2].data).div_(2)
    grads[2].data = grads[0].data


def without_grad(grads: Grads) -> None:
    with torch.no_grad():
        grads[1].mul_(2)


def in_inference_mode(grads: Grads) -> None:
    with torch.inference_mode():
        grads[1].mul_(2)


EDITS: dict[str, Callable[[Grads], Any]] = {
    "data": lambda grads: setattr(grads[0], "data", grads[0].data * 2),
    "data of all": lambda grads: [setattr(grad, "data", grad.data * 2) for grad in grads],
    "data swapped": swap,
    "data shared": share,
    "data transposed": lambda grads: setattr(grads[0], "data", grads[0].data.t()),
    "data in another order": lambda grads: setattr(grads[4], "data", (grads[4].data * 2).t().contiguous().t()),
    "data with gaps": lambda grads: setattr(grads[4], "data", torch.cat([grads[4].data * 2] * 2, 1)[:, :3]),
    "data expanded": lambda grads: setattr(grads[3], "data", torch.ones(1, dtype=grads[3].dtype).expand(300)),
    "data in the same memory": lambda grads: setattr(grads[0], "data", grads[0].data[:1].expand(24, 24)),
    "set_": lambda grads: grads[0].set_((grads[0] * 2).clone()),  # type: ignore[call-overload]
    "set_ with other strides": lambda grads: grads[0].set_(grads[0].untyped_storage(), 0, (24, 24), (1, 24)),
    "transposed in place": lambda grads: grads[0].t_(),
    "in place, data": lambda grads: grads[0].data.mul_(2),
    "in place, foreach": lambda grads: torch._foreach_mul_(grads, 2.0),
    "in place, foreach of data": lambda grads: torch._foreach_mul_([grad.data for grad in grads], 2.0),
    "in place, no_grad": without_grad,
    "in place, inference mode": in_inference_mode,
    "in place, storage": lambda grads: grads[0].untyped_storage().copy_((grads[0] * 2).untyped_storage()),
    "in place, numpy": lambda grads: grads[0].view(torch.uint8).numpy().__ixor__(1),
}

ASSIGNED: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "other": lambda param: setattr(param, "grad", of([param])[0] * 2),
    "the same numbers": lambda param: setattr(param, "grad", of([param])[0].clone()),
    "none": lambda param: setattr(param, "grad", None),
    "inference": lambda param: setattr(param, "grad", made_in_inference_mode(param)),
}


def made_in_inference_mode(param: torch.nn.Parameter) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones_like(param)


KNOBS: dict[str, dict[str, Any]] = {
    "on the host": {"stride": "off"},
    "on both": {"stride": 2.0, "static_ratio": 0.3},
    "on the device": {"stride": 1.0},
}


def early_copies(optimizer: tidegate.AdamW) -> None:
    """Waits until all copies that may be made before `step()` were made."""
    copied_early(optimizer, len(list(optimizer.engine._in_flight().plan.of_kind(OpKind.GRAD_D2H))))


def held_against_the_oracle(
    edit: Callable[[list[torch.nn.Parameter]], Any], dtype: torch.dtype, waits: bool = True, **knobs: Any
) -> None:
    params = params_of(*SHAPES, dtype=dtype)
    with tidegate.AdamW(
        params, lr=0.03, offload=tidegate.Offload(subgroup_numel=200, emulated=FAST, **knobs)
    ) as optimizer:
        if not waits:
            slow_copies(optimizer.device)
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            if waits:
                early_copies(optimizer)
            edit(params)
            gc.collect()
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


@pytest.mark.parametrize("where", KNOBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_edited_after_they_were_copied(edit: str, dtype: torch.dtype, where: str) -> None:
    held_against_the_oracle(lambda params: EDITS[edit](of(params)), dtype, **KNOBS[where])


@pytest.mark.parametrize("edit", ["data", "data of all", "data swapped", "data expanded", "set_"])
def test_gradients_edited_while_they_are_copied(edit: str) -> None:
    held_against_the_oracle(lambda params: EDITS[edit](of(params)), torch.float32, waits=False, stride="off")


@pytest.mark.parametrize("where", KNOBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assigned", ASSIGNED)
def test_gradients_assigned_after_others_were_copied(assigned: str, dtype: torch.dtype, where: str) -> None:
    held_against_the_oracle(lambda params: ASSIGNED[assigned](params[2]), dtype, **KNOBS[where])


@pytest.mark.parametrize(
    "edit", ["data of all", "data swapped", "data transposed", "set_", "in place, foreach of data"]
)
def test_edited_gradients_agree_with_torch(edit: str) -> None:
    ours, theirs = params_of(*SHAPES), params_of(*SHAPES)
    reference = torch.optim.AdamW(theirs, lr=0.03)
    with tidegate.AdamW(ours, lr=0.03, offload=tidegate.Offload(subgroup_numel=200, emulated=FAST)) as optimizer:
        for step in range(5):
            for params, used in ((ours, optimizer), (theirs, reference)):
                used.zero_grad()
                backward(params, random_grads(params, step, some=False))
                if used is optimizer:
                    early_copies(optimizer)
                EDITS[edit](of(params))
                used.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["expanded", "with gaps"])
def test_gradients_without_samples_are_copied_again(kind: str) -> None:
    """A hook may leave a gradient whose elements share memory, or leave gaps. No version tells of edits by `.data`."""
    param = params_of((40, 3))[0]

    def elsewhere(mine: torch.Tensor) -> None:
        assert mine.grad is not None
        grad = mine.grad
        mine.grad = torch.cat([grad] * 2, 1)[:, :3] if kind == "with gaps" else grad[:1].clone().expand(40, 3)

    param.register_post_accumulate_grad_hook(elsewhere)
    with tidegate.AdamW([param], offload=tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST)) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward([param], random_grads([param], step, some=False))
            early_copies(optimizer)
            of([param])[0].data[:1].mul_(2)
            plain.step(grads_of([param]))
            optimizer.step()
            assert plain.same_weights([param])


# ---- what cannot be a gradient


def free(grad: torch.Tensor) -> None:
    grad.untyped_storage().resize_(0)


def test_memory_that_is_gone_is_not_read() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=tidegate.Offload(stride="off", subgroup_numel=200, emulated=FAST)) as optimizer:
        plain = plain_of(optimizer)
        backward(params, random_grads(params, 0, some=False))
        early_copies(optimizer)
        grads = of(params)
        params[0].grad, params[1].grad, grads[3].data = None, torch.ones(77), torch.ones(300)
        for gone in grads[:2]:
            free(gone)
        plain.step(grads_of(params))
        optimizer.step()
        assert plain.same_weights(params)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "shape": (lambda grad: setattr(grad, "data", grad.data[:5]), r"Parameter 0 has a gradient of shape \(5, 24\)"),
    "shape, set_": (lambda grad: grad.set_(torch.ones(3)), r"gradient of shape \(3,\).*weight has \(24, 24\)"),
    "resized": (lambda grad: grad.resize_(48, 24), r"gradient of shape \(48, 24\)"),
    "dtype": (lambda grad: setattr(grad, "data", grad.data.half()), r"torch\.float16 gradient; torch\.float32"),
    "freed": (free, r"memory of the gradient of parameter 0 was freed"),
}


@pytest.mark.parametrize("then", ["dropped", "put right"])
@pytest.mark.parametrize("where", KNOBS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_a_gradient_is_refused_and_training_goes_on(wrong: str, where: str, then: str) -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(
        params, lr=0.03, offload=tidegate.Offload(subgroup_numel=200, emulated=FAST, **KNOBS[where])
    ) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            early_copies(optimizer)
            right = grads_of(params)
            spoil, says = WRONG[wrong]
            spoil(of(params)[0])
            for _ in range(2):
                with pytest.raises(ParameterError, match=says):
                    optimizer.step()
                assert plain.same_weights(params)
            assert len(optimizer.state_dict()["state"]) == (len(params) if step else 0)
            if then == "put right":
                params[0].grad = right[0]
            else:
                optimizer.zero_grad()
                backward(params, right)
            plain.step(right)
            optimizer.step()
            assert plain.same_weights(params)


# ---- on a device that runs behind


def data_assigned(training: FakeTraining) -> None:
    for grad in of(training.params)[::2]:
        training.fake.framework_access(grad, False, "reading a gradient")
        grad.data = grad.data * 2
        training.fake.framework_access(grad, True, "giving a gradient other memory")


def data_swapped(training: FakeTraining) -> None:
    swap(of(training.params))


def set_elsewhere(training: FakeTraining) -> None:
    grad = of(training.params)[1]
    training.fake.framework_access(grad, False, "reading a gradient")
    grad.set_((grad * 2).clone())  # type: ignore[call-overload]
    training.fake.framework_access(grad, True, "giving a gradient other memory")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edit", [data_assigned, data_swapped, set_elsewhere])
def test_gradients_edited_before_a_gpu_has_copied_them(
    edit: Callable[[FakeTraining], None], dtype: torch.dtype, seed: int
) -> None:
    params = params_of(*SHAPES, dtype=dtype)
    stride: Any = ("off", 2.0)[seed % 2]
    with fake_training(
        FakeCuda(seed, eagerness=(0.0, 0.6)[seed // 2]), params, stride=stride, subgroup_numel=200
    ) as training:
        for step in range(4):
            training.zero_grad()
            training.backward(random_grads(params, step, some=False))
            edit(training)
            training.step()
        training.forward()
