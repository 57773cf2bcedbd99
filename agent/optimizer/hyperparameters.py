"""Hyperparameters in param groups as torch's optimizers have them, and what one step takes from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidegate.agent.engine.op_runner import StepInputs
from tidegate.errors import ConfigError, ParameterError
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.kernels.arithmetic.oracle import clip_scale
from tidegate.knobs.setting_checks import check_flag, check_number
from tidegate.rules.rule import UpdateRule

TORCH_DEFAULTS: Mapping[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Keys of torch's param groups besides lr, betas, eps and weight_decay, with their defaults. Param groups have the same
keys as in torch, so that states can be exchanged with torch. `foreach` and `fused` choose among torch's implementations
and are ignored here."""

UNSUPPORTED_OPTIONS = {
    "amsgrad": "it needs another state",
    "capturable": "an offloaded update cannot be captured in a CUDA graph",
    "differentiable": "an offloaded update is outside of autograd",
}
"""Options of torch's AdamW that Tidegate does not support, each with the reason."""


def as_list(params: Iterable[Any]) -> list[Any]:
    """The argument `params` of an optimizer as a list. Raises TypeError for a single tensor, and ParameterError if it
    is empty."""
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be an iterable of tensors or dicts, not a single {torch.typename(params)}.")
    found = list(params)
    if not found:
        raise ParameterError("The optimizer got no parameters: pass model.parameters().")
    return found


def check_group(rule: UpdateRule, group: Mapping[str, Any]) -> None:
    """Raises ConfigError if a hyperparameter of a param group is invalid. Hyperparameters that are absent are not
    checked."""
    for hyperparameter in rule.hyperparameters:
        name = hyperparameter.name
        if name not in group:
            continue
        value = group[name]
        is_one = not isinstance(hyperparameter.default, tuple)
        if is_one and isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ConfigError(f"{name} is a tensor of {value.numel()} elements: it must have 1.")
        if isinstance(hyperparameter.default, bool):
            check_flag(name, value)
        hyperparameter.check(value)
    check_options(group)


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ConfigError if a param group sets an option of torch's AdamW that Tidegate does not support. Called at
    each step, too, because users may set options later."""
    for name, reason in UNSUPPORTED_OPTIONS.items():
        if group.get(name):
            raise ConfigError(f"{name}=True is not supported: {reason}. Leave it out, or set it to False.")


def defaults_of(rule: UpdateRule, given: Mapping[str, Any]) -> dict[str, Any]:
    """The default values of param groups: the rule's hyperparameters, and the other keys that torch's groups have.

    Raises ConfigError for values in `given` that are invalid or that neither the rule nor torch knows.
    """
    known = {**rule.defaults, **TORCH_DEFAULTS}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not an option of {rule.name}: use {', '.join(sorted(known))}.")
    check_group(rule, given)
    return {**known, **given}


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raises ConfigError unless `max_grad_norm` is None or a number above 0."""
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm, above=0.0, of=" (None for no clipping)")


@dataclass(frozen=True, slots=True)
class LossScale:
    """State of a GradScaler in this step. `inverse`: the inverse of its scale, with which gradients must be multiplied.
    `found_inf`: whether it has found gradients that are not finite."""

    inverse: float = 1.0
    found_inf: bool = False

    @classmethod
    def of(cls, optimizer: Any) -> LossScale:
        """Reads the attributes that `GradScaler.step` sets on optimizers with `_step_supports_amp_scaling`."""
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        return cls(1.0 if scale is None else 1.0 / float(scale), found_inf is not None and bool(float(found_inf)))


def called_by_grad_scaler() -> bool:
    """Whether torch's GradScaler is reading the property that calls this function (found from the call stack).

    Other code reads `_step_supports_amp_scaling`, too: Lightning concludes from True that gradients cannot be clipped
    from outside, even without a scaler. A GradScaler that reads False divides the gradients itself: correct, but
    slower.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"


def gradient_factor(norm: float, unscale: float, max_grad_norm: float | None) -> float:
    """Returns the factor by which all gradients are multiplied: `unscale` times the factor that clips their norm.

    norm: norm of the gradients before they are multiplied by `unscale`. unscale: inverse of the loss scale.
    max_grad_norm: limit of the norm after the multiplication by `unscale`; None for no clipping.
    """
    return unscale if max_grad_norm is None else unscale * float(clip_scale(norm * unscale, max_grad_norm))


def step_inputs(
    rule: Implementation,
    groups: Sequence[Mapping[str, Any]],
    steps: Sequence[int],
    loss_scale: LossScale,
    max_grad_norm: float | None,
    make_factor: Callable[[float, float, float | None], float],
) -> StepInputs:
    """What a step needs besides state, weights and gradients: its scalars, the factor for all gradients, and whether a
    GradScaler skips it. Hyperparameters are copied, so that later changes of `groups` have no effect.

    steps: number of updates that each parameter has had.
    make_factor: computes the factor; called like `gradient_factor`.
    """
    snapshots = [_snapshot_group(rule.rule, group) for group in groups]
    signs = [-1.0 if group.get("maximize") else 1.0 for group in groups]
    cache: dict[tuple[int, int, float], Any] = {}

    def of(group: int, step: int, grad_scale: float) -> Any:
        key = (group, step, grad_scale)
        if key not in cache:
            cache[key] = rule.scalars(step=step, grad_scale=signs[group] * grad_scale, **snapshots[group])
        return cache[key]

    return StepInputs(
        steps=[step + 1 for step in steps], scalars=of,
        clip=lambda norm: make_factor(norm, loss_scale.inverse, max_grad_norm),
        skip=loss_scale.found_inf, unscale=loss_scale.inverse,
    )  # fmt: skip


def _snapshot_group(rule: UpdateRule, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters as numbers. They are copied because schedulers change tensors in place, and lanes read the
    values later."""
    check_options(group)
    return {one.name: _snapshot(group.get(one.name, one.default), one.default) for one in rule.hyperparameters}


def _snapshot(value: Any, default: Any) -> Any:
    """The value as numbers, or as a flag if `default` is one. torch accepts tensors for numbers, too."""
    if isinstance(default, tuple):
        return tuple(_snapshot(number, 0.0) for number in value)
    number = value.item() if isinstance(value, torch.Tensor) else value
    return bool(number) if isinstance(default, bool) else float(number)
