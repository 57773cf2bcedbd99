"""What of DeepSpeed Tidegate takes the place of, and in which settings it can: asked before anything is built."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

TESTED: Final = ("0.19.8", "0.19.8")
"""Oldest and newest release that our tests have run with."""

FOUND_IN_TESTED: Final[Mapping[str, frozenset[str]]] = {}
"""Digests of what our code takes the place of or leans on, as `digest` makes them, by method of ZeRO-3's optimizer."""


def differences(optimizer_class: type, version: str) -> list[str]:
    """What of DeepSpeed's ZeRO-3 optimizer is not as in any release that was tested; one sentence each."""
    found = []
    for name, known in FOUND_IN_TESTED.items():
        method = inspect.getattr_static(optimizer_class, name, None)
        if method is None:
            found.append(f"{optimizer_class.__name__}.{name} is not there.")
        elif digest(method) not in known:
            found.append(f"{optimizer_class.__name__}.{name}{inspect.signature(method)} has another body or signature.")
    if found:
        found.append(
            f"This is DeepSpeed {version}; tested are {TESTED[0]} to {TESTED[1]}: install one of those, or say "
            '"fallback": true in the "tidegate" block to train with DeepSpeed\'s own optimizer.'
        )
    return found


def digest(function: Any) -> str:
    """Of a function's code without its comments and docstrings: what changes it may change what it does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            node.body = body[1:]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def unsupported_settings(engine: Any) -> list[str]:
    """What in a DeepSpeedEngine's settings Tidegate cannot work with, each with what to do about it."""
    return list(_unsupported_settings(engine))


def _unsupported_settings(engine: Any) -> Iterator[str]:
    config = engine._config
    zero = config.zero_config
    if int(engine.zero_optimization_stage()) != 3:
        yield (
            f"zero_optimization.stage is {int(engine.zero_optimization_stage())}: Tidegate works with stage 3. Set it "
            "to 3; or, without ZeRO, use tidegate.AdamW with FSDP2 or DDP."
        )
        return
    if engine.has_moe_layers:
        yield "The model has MoE layers, whose experts are divided in another way: train it without Tidegate."
    for name, value in (
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size > 1),
        ("zero_quantized_weights", zero.zero_quantized_weights),
        ("zero_quantized_gradients", zero.zero_quantized_gradients),
        ("mics_shard_size", getattr(zero, "mics_shard_size", -1) > 0),
    ):
        if value:
            yield f"zero_optimization.{name} (ZeRO++, MiCS) divides parameters in another way: leave it out."
    if getattr(zero, "zenflow", None) is not None:
        yield "zero_optimization.zenflow updates a part of the gradients late: leave it out, Tidegate is exact."
    offload = zero.offload_optimizer
    if offload is not None and getattr(offload, "super_offload", False):
        yield "offload_optimizer.super_offload has an update of its own: leave it out."
    yield from _unsupported_offload_of_params(engine, zero.offload_param)
    for name in ("fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients", "bf16_optimizer_states"):
        if getattr(engine, name, bool)():
            yield f"{name}: Tidegate's state is fp32. Leave it out (with bf16 weights 10 bytes a parameter move)."
    if engine.mpu is not None and engine.mpu.get_model_parallel_world_size() > 1:
        yield "A model-parallel unit (mpu) is given: Tidegate takes data and sequence parallelism. Leave it out."
    if getattr(engine, "autotp_size", int)() > 1:
        yield "tensor_parallel.autotp_size is above 1: Tidegate takes data and sequence parallelism. Leave it out."
    if getattr(engine, "torch_autocast_enabled", bool)() and engine.torch_autocast_dtype() == torch.float16:
        yield "torch_autocast with float16 scales losses outside of DeepSpeed: use bfloat16, or the fp16 block."
    if getattr(engine, "is_deepcompile_enabled", bool)():
        yield "compile.deepcompile replaces the hooks that gradients come by: leave it out."


def _unsupported_offload_of_params(engine: Any, offload: Any) -> Iterator[str]:
    device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    if device == "nvme":
        yield 'offload_param.device is "nvme": weights must stay in memory. Use "cpu", and paths for the state.'
    elif device == "cpu" and torch.device(engine.device).type != "cpu":
        yield (
            'offload_param.device is "cpu" on a GPU: the engine updates weights where the GPU has them. Leave '
            "offload_param out; what Tidegate keeps off the GPU is state and gradients."
        )


def unsupported_optimizer(optimizer: Any) -> list[str]:
    """What in the optimizer that DeepSpeed was given, or has made, Tidegate cannot take the place of."""
    kind = type(optimizer)
    known = {("deepspeed", "DeepSpeedCPUAdam"), ("deepspeed", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")}
    if (kind.__module__.partition(".")[0], kind.__name__) not in known:
        return [
            f"The optimizer is {kind.__module__}.{kind.__name__}: Tidegate takes the place of Adam and AdamW "
            '(DeepSpeedCPUAdam, FusedAdam, torch.optim). Set optimizer.type to "AdamW".'
        ]
    found = []
    if getattr(optimizer, "fp32_optimizer_states", True) is False:
        found.append("fp32_optimizer_states is false: Tidegate's state is fp32. Leave it out.")
    for i, group in enumerate(optimizer.param_groups):
        for name, wanted in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            if bool(group.get(name, wanted)) is not wanted:
                found.append(f"Param group {i} has {name}={group[name]}: only {wanted} is supported.")
    return found
