"""Configuration for a capacity plan, to copy and paste: as Python code, and as DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any, Final

from tidegate.capacity.footprint import sums_in_host
from tidegate.capacity.planner import CapacityPlan

_FOLDER: Final = "/path/to/{}"


def settings(plan: CapacityPlan) -> dict[str, Any]:
    """The arguments of `tidegate.Offload` for this plan, by name; the user must fill in the folders of paths.

    Settings that would be "auto" are left out, because Hugging Face's trainers interpret that word in DeepSpeed's
    configuration as a placeholder of their own.
    """
    effective, work = plan.fit.effective, plan.work
    found: dict[str, Any] = {
        "stride": effective.stride,
        "static_ratio": effective.static_ratio,
        "subgroup_numel": work.subgroup_numel,
        "num_slots": work.num_slots,
        "gradients": plan.fit.gradients,
    }
    if plan.fit.gradients == "release":
        found["gradient_memory_bytes"] = int(plan.fit.device["gradients"])
    if sums_in_host(work, plan.fit.gradients):
        found["accumulation"] = "host"
    if plan.fit.rank.host_slots:
        found |= {
            "paths": {name: _FOLDER.format(name) for name in plan.fit.rank.host_slots},
            "host_cache": effective.host_cache_bytes,
            "order": "pinned",
            "host_slots": work.host_slots,
        }
    return found


def python(plan: CapacityPlan) -> str:
    """Python code for a training script, with the numbers of the plan. Replace a number by `auto` to let the tuner
    change it."""
    rule = plan.work.rule
    lines = ["import tidegate", "", f"optimizer = tidegate.{'AdamW' if rule == 'adamw' else 'Optimizer'}("]
    lines += ["    model.parameters(),", *([] if rule == "adamw" else [f'    rule="{rule}",']), "    lr=3e-4,"]
    if plan.fit.gradients == "release":
        lines.append("    max_grad_norm=1.0,  # gradients are released as they arrive: clip here, not in the script")
    lines += ["    offload=tidegate.Offload("]
    lines += [f"        {name}={_literal(value)}," for name, value in settings(plan).items()]
    lines += ["    ),", ")"]
    if sums_in_host(plan.work, plan.fit.gradients):
        lines += [
            f"# {plan.work.accumulation} micro-batches for each update: all backward passes but the last one go into",
            "#     with optimizer.accumulate():",
        ]
    return "\n".join([*lines, ""])


def deepspeed(plan: CapacityPlan) -> dict[str, Any]:
    """DeepSpeed's configuration, with a block `tidegate` that has the same names as the arguments of `Offload`. The
    update rule there is AdamW."""
    work = plan.work
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.microbatch,
        "gradient_accumulation_steps": work.accumulation,
        "zero_optimization": {"stage": 3, "sub_group_size": work.subgroup_numel},
    }
    if work.weight == "bfloat16":
        found["bf16"] = {"enabled": True}
    elif work.weight == "float16":
        found["fp16"] = {"enabled": True}
    return {**found, "tidegate": settings(plan)}


def deepspeed_text(plan: CapacityPlan) -> str:
    return json.dumps(deepspeed(plan), indent=2) + "\n"


def _literal(value: object) -> str:
    """`value` as text for Python code; whole numbers from 10,000 with digit groups."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return json.dumps(value)
