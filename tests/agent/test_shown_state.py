"""`optimizer.state` as others walk it: torch's helpers for checkpoints, libraries that move, clear or fill it."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tidegate
from tests.agent.plain import PlainAdamW
from tests.agent.test_exactness import FAST, backward, random_grads
from tests.agent.test_optimizer import MIXED, params_of, run_steps
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
