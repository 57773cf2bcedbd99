"""Checks, before the optimizer is created, that the DeepSpeed release and its settings are supported."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

TESTED: Final = ("0.19.8", "0.19.8")
"""Oldest and newest release of DeepSpeed that Tidegate's tests have run with."""

TESTED_DIGESTS: Final[Mapping[str, frozenset[str]]] = {
    "_configure_offloading": frozenset({"741fd450b1ad3303"}),
    "_create_fp32_partitions": frozenset({"4c78d899f75ef995"}),
    "_setup_for_real_optimizer": frozenset({"daca9d1bcff0e400"}),
    "destroy": frozenset({"2fa25ef69351b0ed"}),
    "partition_grads": frozenset({"29b164b16cfe79bf"}),
    "_finalize_offload_gradient_accumulation": frozenset({"e686cbad87b2ca2f"}),
    "zero_grad": frozenset({"346d405c7c3e2353"}),
    "_get_fp32_grad_state_partition": frozenset({"b8b050712b858675"}),
    "set_fp32_grad_for_param": frozenset({"cf4ba1fd15317f77"}),
    "set_local_grad_for_param": frozenset({"57c8f34e4938784f"}),
    "update_fp32_grad_for_param_vectorized": frozenset({"8bb6027da90afa2e"}),
    "get_fp32_grad_partitions": frozenset({"97b9ee5677e5daa4"}),
    "complete_grad_norm_calculation_for_cpu_offload": frozenset({"73b03aff4084df4e"}),
    "_get_norm_groups": frozenset({"8b6a3f02f88b05c8"}),
    "step": frozenset({"6e5c7831a7b64c73"}),
    "_get_fp32_opt_state_partition": frozenset({"23ddecdc45e3cf0d"}),
    "set_full_hp_param": frozenset({"85ef9a0f40b79a03"}),
    "set_local_hp_param": frozenset({"1558b579c40171db"}),
    "_rigid_state_dict": frozenset({"3fb34e72924c770b"}),
    "_rigid_load_state_dict": frozenset({"466aa13e2a3c9a37"}),
    "_load_universal_checkpoint": frozenset({"4fc73fb62b10e027"}),
    "_restore_from_bit16_weights": frozenset({"7a9eac09af040d8c"}),
    "reset_swap_buffers": frozenset({"68345845f2522b6e"}),
    "offload_states": frozenset({"e005fd130385a22c"}),
    "reload_states": frozenset({"4710800a93fdc63e"}),
    "initialize_optimizer_states": frozenset({"7513620355e3d846"}),
    "_create_fp16_partitions_with_defragmentation": frozenset({"1f9e2a921223de99"}),
    "_pre_step": frozenset({"9bbaf8664b95ad44"}),
    "_post_step": frozenset({"87aec94ecac5f2bf"}),
    "_loss_scale_update_and_overflow_cleanup": frozenset({"bbc86c65dbf01f13"}),
    "_overflow_clean_up": frozenset({"692a1fdf515c98ad"}),
    "independent_gradient_partition_epilogue": frozenset({"e2b67e3287b78661"}),
    "_partition_all_parameters": frozenset({"50fd7828abb6eacf"}),
    "_set_fp32_optimizer_param_groups": frozenset({"281812f69eec9bee"}),
    "_clear_fp32_optimizer_param_groups": frozenset({"11bf3659b6d3b4d4"}),
    "unscale_and_clip_grads": frozenset({"7ac27643f744dc6c"}),
    "_optimizer_step": frozenset({"6219d62ea3b6820c"}),
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3": frozenset({"ee727613d0dfa754"}),
    "load_module_checkpoint_state_from_checkpoint_dir_stage3": frozenset({"0c5123d2c63e79d3"}),
    "_get_trainable_parameter_groups": frozenset({"124c18c490f8f621"}),
    "finalize_gradient_accumulation_boundary": frozenset({"216a58b697d84007"}),
    "clear_backward_seen_flag": frozenset({"16ac0c675f2921f6"}),
    "__reduce_and_partition_ipg_grads": frozenset({"1da409a6046b7c79"}),
    "__avg_scatter_contiguous_grads": frozenset({"c86af2b21bf18f22"}),
    "__avg_scatter_grads": frozenset({"2382a5ebff4cfcf2"}),
    "_get_param_partition_group": frozenset({"5d72efd9c15bfe5b"}),
    "get_fp32_grad_for_param": frozenset({"0b59765fd7649026"}),
    "_fp32_state_allgather": frozenset({"735ed78de0c2a8b1"}),
}
"""Methods of ZeRO-3's optimizer that Tidegate overrides or calls, with their digests (see `digests`) in the tested
releases."""


def differences(optimizer_class: type, version: str) -> list[str]:
    """Lists differences between DeepSpeed's ZeRO-3 optimizer and all tested releases, one sentence each. Empty if there
    are none."""
    present, name_of = digests(optimizer_class), optimizer_class.__name__
    found = [
        f"{name_of}.{method} has another body or signature." if method in present else f"{name_of} has no {method}."
        for method, known in TESTED_DIGESTS.items()
        if present.get(method) not in known
    ]
    if found:
        found.append(
            f"This is DeepSpeed {version}; tested are {TESTED[0]} to {TESTED[1]}: install one of those, or set "
            '"fallback": true in the "tidegate" block to train with DeepSpeed\'s own optimizer.'
        )
    return found


def digests(kind: type) -> dict[str, str]:
    """Returns a hash (digest) of the source text of each method that a class defines, by name of the method. Comments,
    docstrings and white space do not count. If the digest of a method changes, its behaviour may have changed."""
    source = inspect.getsource(inspect.getmodule(kind) or kind)
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = source.splitlines(keepends=True)
    return {
        node.name: hashlib.sha256(_normalized_source(lines[node.lineno - 1 : node.end_lineno]).encode()).hexdigest()[
            :16
        ]
        for node in classes[kind.__name__].body
        if isinstance(node, ast.FunctionDef)
    }


def _normalized_source(lines: list[str]) -> str:
    """Source text of a function without comments, docstrings and white space. It is the same in every version of
    Python."""
    found, at_start = [], True
    for token in tokenize.generate_tokens(iter(textwrap.dedent("".join(lines)).splitlines(keepends=True)).__next__):
        if token.type in (tokenize.COMMENT, tokenize.NL) or (at_start and token.type == tokenize.STRING):
            continue
        at_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        found.append(token.string)
    return "".join("".join(found).split())


def unsupported_settings(engine: Any) -> list[str]:
    """Settings of a DeepSpeedEngine that Tidegate cannot work with, each with a remedy."""
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
            yield f"{name} is on, and Tidegate's state is fp32: leave it out."
    if engine.mpu is not None and engine.mpu.get_model_parallel_world_size() > 1:
        yield "A model-parallel unit (mpu) is given: Tidegate takes data and sequence parallelism. Leave it out."
    if getattr(engine, "autotp_size", int)() > 1:
        yield "tensor_parallel.autotp_size is above 1: Tidegate takes data and sequence parallelism. Leave it out."
    if getattr(engine, "torch_autocast_enabled", bool)() and engine.torch_autocast_dtype() == torch.float16:
        yield "torch_autocast with float16 scales losses outside of DeepSpeed: use bfloat16, or the fp16 block."
    if getattr(engine, "is_deepcompile_enabled", bool)():
        yield "compile.deepcompile replaces the hooks through which Tidegate gets gradients: leave it out."


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
    """Lists the reasons why Tidegate cannot replace this optimizer, each with a remedy. `optimizer`: the optimizer that
    the user passed to DeepSpeed or that DeepSpeed created."""
    kind = type(optimizer)
    known = {("deepspeed", "DeepSpeedCPUAdam"), ("deepspeed", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")}
    if (kind.__module__.partition(".")[0], kind.__name__) not in known:
        return [
            f"The optimizer is {kind.__module__}.{kind.__name__}: Tidegate takes the place of Adam and AdamW "
            '(DeepSpeedCPUAdam, FusedAdam, torch.optim). Set optimizer.type to "AdamW".'
        ]
    found = []
    if getattr(optimizer, "fp32_optimizer_states", True) is False:
        found.append("fp32_optimizer_states is false, and Tidegate's state is fp32: leave it out.")
    for i, group in enumerate(optimizer.param_groups):
        for name, wanted in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            if bool(group.get(name, wanted)) is not wanted:
                found.append(f"Param group {i} has {name}={group[name]}: only {wanted} is supported.")
        if "decoupled_weight_decay" in group and group["decoupled_weight_decay"] is not (kind.__name__ == "AdamW"):
            found.append(
                f"Param group {i} has decoupled_weight_decay={group['decoupled_weight_decay']} in {kind.__name__}: use "
                "AdamW for decoupled decay and Adam for the other, in all groups."
            )
    return found
