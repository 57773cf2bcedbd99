"""Optimizer state in and out of `state_dict`: whole tensors for each parameter, as torch.optim.AdamW keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tidegate.agent.engine.engine import Engine
from tidegate.agent.subgroups import Segment, flat
from tidegate.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
REFUSED = ("amsgrad", "maximize")
"""Options of torch's AdamW that would change the arithmetic."""

ParamState = Mapping[str, torch.Tensor]


def gather(engine: Engine, params: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
    """The state of each parameter that was updated: step, moments, and `remainder` or `master` of 16-bit weights."""
    found: list[dict[str, torch.Tensor]] = [_empty_moments(param) for param in params]
    for layout in engine.layouts:
        with engine.memory.on_host(layout.id) as arrays:
            for s in layout.segments:
                for name, array in arrays.items():
                    like = params[s.param]
                    whole = found[s.param].setdefault(name, torch.empty_like(like, dtype=array.dtype))
                    flat(whole)[s.offset : s.offset + s.numel] = array[s.start : s.start + s.numel]
    return {i: {"step": torch.tensor(float(step)), **found[i]} for i, step in enumerate(steps) if step}


def _empty_moments(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters of no elements are in no subgroup."""
    return {} if param.numel() else {name: torch.empty_like(param, dtype=torch.float32) for name in MOMENTS}


def check(state_dict: Mapping[str, Any], params: Sequence[torch.Tensor]) -> None:
    """ConfigError when this state cannot be loaded; to be asked before anything is changed."""
    for group in state_dict["param_groups"]:
        for option in REFUSED:
            if group.get(option):
                raise ConfigError(f"The state was made with {option}=True, which Tidegate does not do.")
    state: Mapping[int, ParamState] = state_dict["state"]
    for index, given in state.items():
        if not 0 <= index < len(params):
            raise ConfigError(
                f"The state has a parameter {index}, the model has {len(params)}: it is of another model."
            )
        for name in MOMENTS:
            if name not in given:
                raise ConfigError(f"The state of parameter {index} lacks {name}: it is not AdamW's.")
            if given[name].shape != params[index].shape:
                raise ConfigError(
                    f"{name} of parameter {index} has shape {tuple(given[name].shape)}, "
                    f"the parameter {tuple(params[index].shape)}: the state belongs to another model."
                )


def scatter(engine: Engine, params: Sequence[torch.Tensor], state: Mapping[int, ParamState]) -> None:
    """Puts a checked state where the subgroups live; moments of parameters without state become 0."""
    engine.weights_loaded()
    for layout in engine.layouts:
        with engine.memory.on_host(layout.id) as arrays:
            for s in layout.segments:
                for name, array in arrays.items():
                    part = array[s.start : s.start + s.numel]
                    _set_part(part, s, name, state.get(s.param, {}), params[s.param])


def _set_part(part: torch.Tensor, s: Segment, name: str, given: ParamState, param: torch.Tensor) -> None:
    if name not in given:
        if name in MOMENTS:
            part.zero_()
        return
    whole = torch.empty_like(param, dtype=part.dtype).copy_(given[name])
    values = flat(whole)[s.offset : s.offset + s.numel]
    if name == "master":
        # The weight is authoritative: a master that does not round to it belongs to another weight.
        weight = flat(param)[s.offset : s.offset + s.numel]
        values = torch.where(values.to(weight.dtype) == weight, values, weight.float())
    part.copy_(values)
