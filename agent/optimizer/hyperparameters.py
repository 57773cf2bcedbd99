"""Hyperparameters as `torch.optim.AdamW` has them, and the scalars of one step that are computed from them (step size,
bias correction and others)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidegate.agent.engine.op_runner import StepInputs
from tidegate.errors import ConfigError
from tidegate.kernels import Scalars, scalars
from tidegate.kernels.arithmetic.oracle import clip_scale
from tidegate.knobs.setting_checks import check_flag, check_number

TORCH_DEFAULTS: Mapping[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
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


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ConfigError if a hyperparameter of a param group is invalid. Hyperparameters that are absent are not
    checked."""
    lr = group.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of {lr.numel()} elements: it must have 1.")
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not group[name] >= 0.0:
            raise ConfigError(f"{name}={group[name]} is out of range: it must be at least 0.")
    for i, beta in enumerate(group.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas[{i}]={beta} is out of range: it must be at least 0 and below 1.")
    check_options(group)


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ConfigError if a param group sets an option of torch's AdamW that Tidegate does not support. Called at
    each step, too, because users may set options later."""
    for name, reason in UNSUPPORTED_OPTIONS.items():
        if group.get(name):
            raise ConfigError(f"{name}=True is not supported: {reason}. Leave it out, or set it to False.")


def defaults_of(hyperparameters: Mapping[str, Any], torch_options: Mapping[str, Any]) -> dict[str, Any]:
    """The default values of param groups, with the same keys as in torch.

    Raises ConfigError for options that torch does not have, and for invalid values.
    """
    unknown = sorted(set(torch_options) - set(TORCH_DEFAULTS))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not an option of AdamW: check its name.")
    defaults = {**hyperparameters, **TORCH_DEFAULTS, **torch_options}
    check_flag("decoupled", defaults["decoupled_weight_decay"])
    check_group(defaults)
    return defaults


def complete_loaded_groups(groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Adds the keys that loaded param groups lack, such as groups of older versions of torch. Groups of an Adam become
    groups of AdamW if `defaults` are those of AdamW."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
        if defaults["decoupled_weight_decay"]:
            # As in torch's AdamW: a state of Adam does not make it Adam.
            group["decoupled_weight_decay"] = True


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
    groups: Sequence[Mapping[str, Any]],
    steps: Sequence[int],
    loss_scale: LossScale,
    max_grad_norm: float | None,
    make_scalars: Callable[..., Scalars] = scalars,
    make_factor: Callable[[float, float, float | None], float] = gradient_factor,
) -> StepInputs:
    """What a step needs besides state, weights and gradients: its scalars, the factor for all gradients, and whether a
    GradScaler skips it. Hyperparameters are copied, so that later changes of `groups` have no effect.

    steps: number of updates that each parameter has had.
    make_scalars, make_factor: functions that compute scalars and factor, with the signatures of the default functions.
    """
    snapshots = [_snapshot_group(group) for group in groups]
    cache: dict[tuple[int, int, float], Scalars] = {}

    def of(group: int, step: int, grad_scale: float) -> Scalars:
        key = (group, step, grad_scale)
        if key not in cache:
            cache[key] = _scalars(make_scalars, snapshots[group], step, grad_scale)
        return cache[key]

    return StepInputs(
        steps=[step + 1 for step in steps], scalars=of,
        clip=lambda norm: make_factor(norm, loss_scale.inverse, max_grad_norm),
        skip=loss_scale.found_inf, unscale=loss_scale.inverse,
    )  # fmt: skip


def _snapshot_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters as numbers. They are copied because schedulers change tensors in place, and lanes read the
    values later."""
    check_options(group)
    return {
        "lr": _number(group["lr"]),
        "beta1": _number(group["betas"][0]),
        "beta2": _number(group["betas"][1]),
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
        "decoupled": bool(group.get("decoupled_weight_decay", True)),
        "maximize": bool(group.get("maximize")),
    }


def _scalars(make: Callable[..., Scalars], values: Mapping[str, Any], step: int, grad_scale: float) -> Scalars:
    numbers = {name: value for name, value in values.items() if name != "maximize"}
    return make(step=step, grad_scale=-grad_scale if values["maximize"] else grad_scale, **numbers)


def _number(value: Any) -> float:
    """The value as a float: torch accepts tensors for lr and betas, too."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
