"""Memory footprint that does not depend on the knobs: GPU memory of a rank, and host memory of a node."""

from __future__ import annotations

from typing import Final, Literal

from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.model_shapes import ModelShape
from tidegate.plan.ops import Subgroup

USABLE_DEVICE: Final = 0.92
"""Share of GPU memory for tensors; the rest is for the driver and the collectives, or lost to fragmentation."""
USABLE_HOST: Final = 0.9
"""Share of host memory for the job, as in MLP-Offload, section 4.1."""
LIVE_PARAMS: Final = 10**9
"""Largest number of parameters that are gathered (whole on each GPU) at a time: the default of DeepSpeed's
`stage3_max_live_parameters`."""
FRAMEWORK_HOST_BYTES: Final = 4 * 10**9
"""Host memory of each rank for Python, torch and the data loader."""
SUMS_STAGING_BYTES: Final = 32 << 20
"""Size of the engine's staging buffer for gradients that are added to their sums in host memory."""


def subgroups_of(params: int, work: Workload) -> list[Subgroup]:
    """The subgroups of a rank with `params` parameters: full subgroups, and a smaller one for the remainder."""
    full, rest = divmod(params, work.subgroup_numel)
    sizes = [work.subgroup_numel] * full + ([rest] if rest else [])
    return [Subgroup(i, n, work.weight_bytes, work.weight_bytes, work.state_bytes) for i, n in enumerate(sizes)]


def device_bytes(
    shape: ModelShape, machine: Machine, work: Workload, gradients: Literal["keep", "release"]
) -> dict[str, float]:
    """GPU memory of one rank in bytes, by kind of data, without optimizer state. Weights and gradients are sharded over
    all ranks.

    Keys of the result: weights: this rank's share of the weights. gradients: with `keep`, this rank's share of the
    gradients; with `release`, at most the gradients of two subgroups, which are on their way to host memory
    (`placement_fit.fit` adds the gradients that stay on the GPU until the update). gathered: weights that are
    temporarily whole on each GPU, as many as DeepSpeed keeps by default (`LIVE_PARAMS`, but at least one matrix and at
    most two blocks), and the gradient of the largest matrix; 0 if there is only one rank. activations: the activations
    kept between blocks, the working set of one block, and the logits (Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", eq. 1, without the attention matrix, because fused attention kernels do
    not store it).
    """
    matrix = max(shape.hidden * shape.ffn, shape.embedding_params)
    gathered = max(matrix, min(LIVE_PARAMS, 2 * shape.block_params)) + matrix
    tokens = work.sequence * work.microbatch
    kept = shape.layers * 2 if work.checkpointing else shape.layers * 34
    sharded = shape.params * work.weight_bytes / machine.ranks
    return {
        "weights": sharded,
        "gradients": sharded if gradients == "keep" else min(sharded, 2 * work.subgroup_numel * work.weight_bytes),
        "gathered": float(gathered * work.weight_bytes) if machine.ranks > 1 else 0.0,
        "activations": float(tokens * (shape.hidden * (kept + 34) + shape.vocab * 6)),
    }


def sums_in_host(work: Workload, gradients: Literal["keep", "release"]) -> bool:
    """Whether gradients of micro-batches are summed in host memory: with released gradients and several micro-batches
    per update, because otherwise all gradients would stay in `.grad`."""
    return gradients == "release" and work.accumulation > 1


def sums_bytes(params: int, work: Workload, gradients: Literal["keep", "release"]) -> int:
    """Host memory in bytes for the gradient sums of one rank with `params` parameters; 0 if the GPU holds the sums."""
    return SUMS_STAGING_BYTES + params * work.weight_bytes if sums_in_host(work, gradients) else 0


def device_room(machine: Machine) -> float:
    """Usable GPU memory of one rank, in bytes."""
    return USABLE_DEVICE * machine.gpu_memory_bytes


def host_room(machine: Machine) -> float:
    """Usable host memory of one rank, in bytes, including the memory of its framework."""
    return USABLE_HOST * machine.host_memory_bytes / machine.gpus
