"""`optimizer.state` as others walk it: torch's helpers for checkpoints, libraries that move, clear or fill it."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tests.examples import examples
from tidegate.errors import ConfigError

SHAPES = ((40, 3), (77,))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact_from_here(optimizer: tidegate.AdamW, params: list[torch.nn.Parameter]) -> None:
    """As an optimizer that is built now."""
    plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
    for step in range(2):
        grads = random_grads(params, 30 + step, some=False)
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flattened_state_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    """As torchtitan saves it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    models = [torch.nn.Linear(8, 3).to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with (
        tidegate.AdamW(models[0].parameters(), offload=MIXED) as saved,
        tidegate.AdamW(models[1].parameters(), offload=MIXED) as loaded,
    ):
        run_steps(saved, list(models[0].parameters()), 0, 3)
        models[1].load_state_dict(models[0].state_dict())
        dcp.save(get_optimizer_state_dict(models[0], saved, options=options), checkpoint_id=tmp_path)
        state = get_optimizer_state_dict(models[1], loaded, options=options)
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(models[1], loaded, state, options=options)
        assert loaded.steps == (3, 3)
        for model, optimizer in ((models[0], saved), (models[1], loaded)):
            run_steps(optimizer, list(model.parameters()), 3, 2)
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_those_of_the_state_dict(dtype: torch.dtype) -> None:
    params = params_of(*SHAPES, dtype=dtype)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        assert not optimizer.state
        run_steps(optimizer, params, 0, 2)
        state = optimizer.state_dict()["state"]
        for number, param in enumerate(params):
            assert optimizer.state[param].keys() == state[number].keys()
            for name, value in optimizer.state[param].items():
                assert (value.shape, value.dtype) == (state[number][name].shape, state[number][name].dtype)
                assert torch.equal(value + 0, state[number][name])
        assert float(optimizer.state[params[0]]["step"]) == 2
        assert optimizer.state[params[0]]["exp_avg"].norm() == state[0]["exp_avg"].norm()
        run_steps(optimizer, params, 2, 1)
        assert optimizer.state[params[0]]["step"] == 3


def test_parameters_that_share_a_subgroup_are_read_alone() -> None:
    params = params_of((7,), (8,), (200,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        state = optimizer.state_dict()["state"]
        for number, param in enumerate(params):
            assert torch.equal(optimizer.state[param]["exp_avg_sq"] + 0, state[number]["exp_avg_sq"])


def test_who_moves_entries_to_a_device_and_back_changes_nothing() -> None:
    """As Lightning does it, and verl."""
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
        for step in range(4):
            grads = random_grads(params, step, some=False)
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            for param, entry in optimizer.state.items():
                optimizer.state[param] = {name: value.to("cpu", non_blocking=True) for name, value in entry.items()}
                for name, value in entry.items():
                    entry[name] = value.to("meta")
            optimizer.state = optimizer.state
        assert plain.same_weights(params)


def clear(optimizer: tidegate.AdamW) -> None:
    optimizer.state.clear()


def assign(optimizer: tidegate.AdamW) -> None:
    optimizer.state = defaultdict(dict)


def delete(optimizer: tidegate.AdamW) -> None:
    for param in list(optimizer.state):
        del optimizer.state[param]


def empty(optimizer: tidegate.AdamW) -> None:
    for param in optimizer.state:
        optimizer.state[param] = {}


def pop(optimizer: tidegate.AdamW) -> None:
    while optimizer.state:
        _, entry = optimizer.state.popitem()
        assert entry["exp_avg"].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [clear, assign, delete, empty, pop])
def test_an_emptied_state_begins_anew(how: Any, dtype: torch.dtype) -> None:
    params = params_of(*SHAPES, dtype=dtype)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 3)
        how(optimizer)
        assert not any(optimizer.state.values())
        assert optimizer.steps == (0, 0)
        assert not optimizer.state_dict()["state"]
        exact_from_here(optimizer, params)


def test_one_parameter_begins_anew_and_the_others_go_on(tmp_path: Path) -> None:
    params = params_of(*SHAPES)
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 2)
        before = optimizer.state_dict()["state"]
        del optimizer.state[params[0]]
        assert optimizer.steps == (0, 2)
        after = optimizer.state_dict()["state"]
        assert after.keys() == {1}
        assert torch.equal(after[1]["exp_avg"], before[1]["exp_avg"])
        run_steps(optimizer, params, 2, 1)
        assert optimizer.steps == (1, 3)


@pytest.mark.parametrize(
    "write",
    [
        lambda state, param: state[param]["exp_avg"].zero_(),
        lambda state, param: state[param]["step"].fill_(7),
        lambda state, param: state[param]["exp_avg"].copy_(torch.ones(40, 3)),
        lambda state, param: state[param]["exp_avg"].data.mul_(2),
        lambda state, param: state[param].update(exp_avg=torch.ones(40, 3)),
        lambda state, param: state[param].__setitem__("step", 7),
        lambda state, param: state[param].pop("exp_avg"),
        lambda state, param: state[param].clear(),
        lambda state, param: state.update({param: {"step": 1, "exp_avg": torch.ones(40, 3)}}),
        lambda state, param: torch.add(torch.ones(40, 3), 1, out=state[param]["exp_avg"]),
        lambda state, param: state[param]["exp_avg"].__setitem__(0, 5),
        lambda state, param: state[param]["exp_avg"].__setitem__((slice(None), slice(2)), 5),
        lambda state, param: state[param]["exp_avg"].__setitem__(torch.ones(40, 3, dtype=torch.bool), 5),
        lambda state, param: state[param]["exp_avg"][0].zero_(),
        lambda state, param: state[param]["exp_avg"][0][1:].data.zero_(),
        lambda state, param: state[param]["exp_avg"].view(-1).mul_(2),
        lambda state, param: state[param]["exp_avg"].flatten().mul_(2),
        lambda state, param: state[param]["exp_avg"].reshape(3, 40).mul_(2),
        lambda state, param: state[param]["exp_avg"].view(torch.int32).zero_(),
        lambda state, param: state[param]["exp_avg"].T.mul_(2),
        lambda state, param: state[param]["exp_avg"].contiguous().zero_(),
        lambda state, param: state[param]["exp_avg"].cpu().unsqueeze(0).zero_(),
        lambda state, param: setattr(state[param]["exp_avg"], "data", torch.ones(40, 3)),
        lambda state, param: setattr(state[param]["exp_avg"][0], "data", torch.ones(3)),
        lambda state, param: [row.zero_() for row in state[param]["exp_avg"]],
        lambda state, param: state[param]["exp_avg"].chunk(2)[1].zero_(),
        lambda state, param: state[param]["exp_avg"].unbind(1)[2].zero_(),
        lambda state, param: state[param]["exp_avg"].split([30, 10])[0].zero_(),
        lambda state, param: state[param]["exp_avg"].unsafe_split(20)[0].zero_(),
        lambda state, param: state[param]["exp_avg"].unsafe_chunk(2)[0].zero_(),
        lambda state, param: torch._foreach_mul_([state[param]["exp_avg"][0]], 2),
        lambda state, param: torch.nn.Parameter(state[param]["exp_avg"]).data.zero_(),
    ],
)
def test_what_would_be_lost_is_refused_and_two_calls_are_named(write: Any) -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        before = optimizer.state_dict()["state"][0]
        with pytest.raises(ConfigError, match=r"optimizer\.state_dict\(\).*optimizer\.load_state_dict\(state\)"):
            write(optimizer.state, params[0])
        after = optimizer.state_dict()["state"][0]
        assert all(torch.equal(after[name], value) for name, value in before.items())


VIEWS: dict[str, Any] = {
    "row": lambda t, n: t[n % t.shape[0]] if t.dim() else t.view(1),
    "slice": lambda t, n: t[n % 3 :] if t.dim() else t.view(1),
    "steps": lambda t, n: t[:: n % 3 + 1] if t.dim() else t.view(1),
    "last": lambda t, n: t[..., :2] if t.dim() else t.view(1),
    "flatten": lambda t, n: t.flatten(),
    "reshape": lambda t, n: t.reshape(-1, 1),
    "transpose": lambda t, n: t.transpose(0, -1) if t.dim() else t.view(1),
    "unsqueeze": lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    "squeeze": lambda t, n: t.squeeze(),
    "expand": lambda t, n: t.unsqueeze(0).expand(2, *t.shape),
    "narrow": lambda t, n: t.narrow(0, 0, max(1, t.shape[0] // 2)) if t.dim() and t.shape[0] else t.view(-1),
    "chunk": lambda t, n: t.chunk(2)[0] if t.dim() else t.view(1),
    "split": lambda t, n: t.split(3)[-1] if t.dim() else t.view(1),
    "unbind": lambda t, n: t.unbind()[n % t.shape[0]] if t.dim() else t.view(1),
    "iteration": lambda t, n: next(iter(t)) if t.dim() else t.view(1),
    "diagonal": lambda t, n: t.diagonal() if t.dim() > 1 else t.view_as(t),
    "unfold": lambda t, n: t.unfold(0, 2, 1) if t.dim() and t.shape[0] > 1 else t.view_as(t),
    "int32": lambda t, n: t.view(torch.int32).view(torch.float32),
    "detach": lambda t, n: t.detach(),
    "data": lambda t, n: t.data,
    "cpu": lambda t, n: t.cpu(),
    "contiguous": lambda t, n: t.contiguous(),
    "bool mask": lambda t, n: t[t > 0],
    "numbers": lambda t, n: t[[0]] if t.dim() and t.shape[0] else t.view(-1),
    "clone": lambda t, n: t.clone(),
}


@settings(max_examples=examples(60), deadline=None)
@given(views=st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 5)), max_size=4))
def test_views_are_read_as_those_of_ordinary_tensors(stepped: Any, views: list[tuple[str, int]]) -> None:
    optimizer, params, moments = stepped
    for param, plain in zip(params, moments, strict=True):
        shown = optimizer.state[param]["exp_avg"]
        for name, number in views:
            if not plain.numel():
                break
            try:
                plain = VIEWS[name](plain, number)
            except RuntimeError:  # torch has no such view of these strides
                with pytest.raises(RuntimeError):
                    VIEWS[name](shown, number)
                break
            shown = VIEWS[name](shown, number)
        assert (shown.shape, shown.stride(), shown.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert torch.equal(shown + 0, plain)
        assert shown.tolist() == plain.tolist()


@pytest.fixture(scope="module")
def stepped() -> Iterator[tuple[tidegate.AdamW, list[torch.nn.Parameter], list[torch.Tensor]]]:
    """After two steps, one parameter of which has columns that lie together; and what `state_dict()` has."""
    params = params_of(*SHAPES)
    params.append(torch.nn.Parameter(torch.linspace(0, 1, 24).view(4, 6).T))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        yield optimizer, params, [values["exp_avg"] for values in optimizer.state_dict()["state"].values()]


def test_arrays_of_numpy_are_read_and_cannot_be_written(stepped: Any) -> None:
    optimizer, params, moments = stepped
    shown = optimizer.state[params[0]]["exp_avg"]
    for array in (shown.numpy(), shown.numpy(force=True), np.asarray(shown), np.array(shown[:])):
        assert np.array_equal(array, moments[0].numpy())
    assert np.asarray(shown, dtype=np.float64).sum() == moments[0].double().sum()
    assert optimizer.state[params[0]]["step"].tolist() == 2
    with pytest.raises(ValueError, match="read-only"):
        shown.numpy()[0] = 5


def test_names_and_keys_of_users_stay_and_are_saved() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.state["global"] = {"rounds": 3}
        optimizer.state[params[0]]["slow"] = torch.ones(40, 3)
        run_steps(optimizer, params, 0, 2)
        assert optimizer.state[params[0]]["slow"].all()
        state = optimizer.state_dict()
        assert state["state"]["global"] == {"rounds": 3}
        assert state["state"][0]["slow"].all()
        optimizer.load_state_dict(state)
        assert optimizer.state["global"] == {"rounds": 3}
        assert optimizer.steps == (2, 2)
        assert optimizer.state[params[0]]["slow"].all()
        optimizer.param_groups[0]["params"].reverse()
        run_steps(optimizer, params, 2, 1)
        assert optimizer.state[params[0]]["slow"].all()
        optimizer.state[stranger := torch.nn.Parameter(torch.ones(1))]["mine"] = 1
        del optimizer.state[stranger]
        assert optimizer.steps == (3, 3)


def test_entries_are_copied_and_pickled_as_tensors() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        expected = optimizer.state_dict()["state"][0]["exp_avg"]
        entry = optimizer.state[params[0]]
        file = io.BytesIO()
        torch.save(dict(entry), file)
        file.seek(0)
        for one in (copy.deepcopy(entry), torch.load(file), {name: value.clone() for name, value in entry.items()}):
            assert torch.equal(one["exp_avg"], expected)
            one["exp_avg"].zero_()
        assert torch.equal(optimizer.state[params[0]]["exp_avg"] + 0, expected)
