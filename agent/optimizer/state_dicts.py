"""Converts the engine's state to the entries of a `state_dict` and back: whole tensors for each parameter, as in
torch's optimizers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tidegate.agent.engine.engine import Engine
from tidegate.agent.optimizer.hyperparameters import check_group
from tidegate.agent.parameters.shards import local_part, wrap_like
from tidegate.agent.parameters.subgroups import AUX_ARRAYS, AUX_NAMES, Segment, flat, format_of
from tidegate.errors import ConfigError
from tidegate.rules.rule import UpdateRule

ParamState = Mapping[str, torch.Tensor]


def dtypes(rule: UpdateRule) -> dict[str, torch.dtype]:
    """The dtypes of the entries that the engine has for a parameter: `step`, the tensors of the update rule and, for a
    16-bit weight, what completes it to fp32: `remainder` or `master`. Other entries belong to the user."""
    arrays = (*rule.tensors, *AUX_ARRAYS)
    return {"step": torch.float32} | {array.name: getattr(torch, array.dtype) for array in arrays}


def gather(engine: Engine, params: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
    """The state of each parameter that was updated: step, tensors of the update rule, and `remainder` or
    `master` of 16-bit weights."""
    if not any(steps):
        return {}  # cheap, as in torch: Accelerate calls this at construction
    shards = engine.shards
    gathered: list[dict[str, torch.Tensor]] = [_empty_tensors(engine.rule, shard) for shard in shards]
    for layout in engine.layouts:
        if not any(steps[s.param] for s in layout.segments):
            continue
        with engine.memory.arrays(layout.id, changed=False) as arrays:
            for s in layout.segments:
                for name, array in arrays.items():
                    # On the host, where the state comes from: it may not fit on the device.
                    like = shards[s.param]
                    whole = gathered[s.param].setdefault(name, torch.empty_like(like, dtype=array.dtype, device="cpu"))
                    flat(whole)[s.offset : s.offset + s.numel] = array[s.start : s.start + s.numel]
    return {
        i: {
            "step": torch.tensor(float(step), device="cpu"),
            **{name: wrap_like(params[i], part) for name, part in gathered[i].items()},
        }
        for i, step in enumerate(steps)
        if step
    }


def names(engine: Engine, param: int) -> tuple[str, ...]:
    """Names of the state entries of this parameter, `step` included."""
    shard = engine.shards[param]
    arrays = format_of(shard, engine.rule).arrays if shard.numel() else engine.rule.tensors
    return ("step", *(array.name for array in arrays))


def reset(engine: Engine, params: Collection[int]) -> None:
    """Resets the state of these parameters to the state before their first update: the tensors of the update
    rule are 0; weights stay unchanged."""
    for layout in engine.layouts:
        segments = [s for s in layout.segments if s.param in params]
        if not segments:
            continue
        with engine.memory.arrays(layout.id) as arrays:
            for s in segments:
                for tensor in engine.rule.tensors:
                    arrays[tensor.name][s.start : s.start + s.numel] = 0
        for s in segments:
            engine.memory.reset_aux(layout.id, s.start, flat(engine.shards[s.param])[s.offset : s.offset + s.numel])


def _empty_tensors(rule: UpdateRule, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """State of a parameter without elements, which is in no subgroup; an empty dictionary for other parameters."""
    empty = () if param.numel() else rule.tensors
    return {one.name: torch.empty_like(param, dtype=getattr(torch, one.dtype), device="cpu") for one in empty}


def apply_load_pre_hooks(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Runs torch's pre-hooks of `load_state_dict`, and returns the state dict that they produce."""
    given = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, given)
        given = given if changed is None else changed
    return given


@contextmanager
def without_torch_load_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager in which `load_state_dict` of torch runs no hooks: torch would run them before the engine has
    loaded the state."""
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    original = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in original.items():
            setattr(optimizer, name, hooks)


def by_position(state_dict: Mapping[str, Any]) -> tuple[dict[int, ParamState], dict[Any, Any]]:
    """Divides a state dict into two parts: the state of each parameter by its position among the parameters of all
    groups, whatever keys the groups use, and the entries that belong to no parameter.

    Raises ConfigError if the state has a parameter that is in no group.
    """
    places: dict[Any, int] = {}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            places.setdefault(key, len(places))
    own: dict[int, ParamState] = {}
    others: dict[Any, Any] = {}
    for key, values in state_dict["state"].items():
        if key in places:
            if values:  # empty: reading the entry of a parameter without state creates an empty entry
                own[places[key]] = values
        elif isinstance(key, int):
            raise ConfigError(
                f"The state dict has state of parameter {key}, but its param groups list {len(places)} parameters: it "
                "belongs to another model, or is damaged."
            )
        else:
            others[key] = values
    return own, others


def with_num_steps(packed: dict[str, Any], num_steps: int, steps: Sequence[int]) -> dict[str, Any]:
    """Returns `packed` with the additional key `num_steps`, if this number is larger than all `steps` of the parameters
    because steps were skipped; else returns `packed` unchanged.

    torch's optimizers ignore this key. It is left out where it is not needed, because `torch.distributed.checkpoint`
    does not save it, and cannot load into a state dict with a key that the saved one lacks.
    """
    return packed if num_steps == max(steps, default=0) else {**packed, "num_steps": num_steps}


def total_steps(given: Mapping[str, Any], steps: Sequence[int]) -> int:
    """Number of training steps before a state was saved: the value of its key `num_steps`, but not less than the
    largest of `steps`, the numbers of updates of the parameters."""
    return max(whole_steps(given.get("num_steps", 0), "num_steps"), *steps, 0)


def whole_steps(value: Any, what: str) -> int:
    """Converts a number of steps in a state dict to an int. Raises ConfigError, with `what` as the name of the value,
    if it is not a whole number of at least 0."""
    number = value
    try:
        if isinstance(value, torch.Tensor):
            number = value.item()
        if not isinstance(number, str) and number >= 0 and int(number) == number:
            return int(number)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # NaN, infinity, several elements, something else
        pass
    shown = f"{number!r:.80}"
    raise ConfigError(f"{what}={shown} is not a number of steps: a whole number, at least 0. The state is damaged.")


def check(
    rule: UpdateRule,
    param_groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, ParamState],
    params: Sequence[torch.Tensor],
) -> None:
    """Raises ConfigError if this state cannot be loaded. To be called before anything is changed."""
    for group in param_groups:
        check_group(rule, group)
    for index, given in state.items():
        if index >= len(params):
            raise ConfigError(
                f"The state dict has state of parameter {index}, but the model has {len(params)} parameters: it "
                "belongs to another model. Give the state of this one."
            )
        if "step" not in given:
            raise ConfigError(f"The state of parameter {index} has no step: give a state that {rule.name} saved.")
        whole_steps(given["step"], f"The state of parameter {index} cannot be loaded: step")
        for name in (tensor.name for tensor in rule.tensors):
            if name not in given:
                raise ConfigError(f"The state of parameter {index} has no {name}: give a state that {rule.name} saved.")
            if given[name].shape != params[index].shape:
                raise ConfigError(
                    f"{name} of parameter {index} has shape {tuple(given[name].shape)}, "
                    f"but the parameter has shape {tuple(params[index].shape)}: the state belongs to another model."
                )


def scatter(engine: Engine, params: Sequence[torch.Tensor], state: Mapping[int, ParamState]) -> None:
    """Loads a checked state into the engine's memory; tensors of the update rule become 0 for parameters without
    state."""
    engine.weights_loaded()
    known = {array.name for array in (*engine.rule.tensors, *AUX_ARRAYS)}
    mine = {i: {name: local_part(value, params[i]) for name, value in given.items() if name in known}
            for i, given in state.items()}  # fmt: skip
    for layout in engine.layouts:
        with engine.memory.arrays(layout.id) as arrays:
            for s in layout.segments:
                for name, array in arrays.items():
                    part = array[s.start : s.start + s.numel]
                    _set_part(part, s, name, mine.get(s.param, {}), engine.shards[s.param])


def _set_part(part: torch.Tensor, s: Segment, name: str, given: ParamState, param: torch.Tensor) -> None:
    if name not in given:
        if name not in AUX_NAMES:
            part.zero_()
        return
    whole = torch.empty_like(param, dtype=part.dtype, device="cpu").copy_(given[name])
    values = flat(whole)[s.offset : s.offset + s.numel]
    if name == "master":
        # The weight takes precedence: a master that does not round to it belongs to another weight, and is replaced.
        weight = flat(param)[s.offset : s.offset + s.numel].cpu()
        values = torch.where(values.to(weight.dtype) == weight, values, weight.float())
    part.copy_(values)
