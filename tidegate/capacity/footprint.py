"""What a rank must have in GPU memory whatever the knobs, and what a node must have in host memory."""

from __future__ import annotations

from typing import Final, Literal

from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.model_shapes import ModelShape
from tidegate.plan.ops import Subgroup

USABLE_DEVICE: Final = 0.92
"""Share of GPU memory for tensors: the rest is the driver's, the collectives', and lost between blocks."""
USABLE_HOST: Final = 0.9
"""Share of host memory for the job, as in MLP 4.1."""
LIVE_PARAMS: Final = 10**9
"""DeepSpeed's `stage3_max_live_parameters`."""
FRAMEWORK_HOST_BYTES: Final = 4 * 10**9
"""Host memory of each rank for Python, torch and the data loader."""
SUMS_STAGING_BYTES: Final = 32 << 20
"""Of gradients on their way to their sums in host memory, as the engine has it."""


def subgroups_of(params: int, work: Workload) -> list[Subgroup]:
    """The subgroups of a rank that holds `params` parameters: full ones, and what is left over."""
    full, rest = divmod(params, work.subgroup_numel)
    sizes = [work.subgroup_numel] * full + ([rest] if rest else [])
    return [Subgroup(i, n, work.weight_bytes, work.weight_bytes, work.state_bytes) for i, n in enumerate(sizes)]


def device_bytes(
    shape: ModelShape, machine: Machine, work: Workload, gradients: Literal["keep", "release"]
) -> dict[str, float]:
    """GPU memory of one rank by kind, without any state. Weights and gradients are sharded over all ranks.

    gathered: weights that are whole for a while, as many as DeepSpeed keeps by default (`LIVE_PARAMS`, but one matrix
    and no more than two blocks), and the gradient of the largest matrix. activations: what is kept between blocks, the
    working set of one, and the logits (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", eq. 1, without the attention matrix: kernels do not write it). Gradients that are released wait for no
    other micro-batch there: their sums are in host memory, see `sums_bytes`.
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
    """Sums of micro-batches' gradients wait in host memory: what is released would else stay in `.grad`, all of it."""
    return gradients == "release" and work.accumulation > 1


def sums_bytes(params: int, work: Workload, gradients: Literal["keep", "release"]) -> int:
    """Host memory of one rank, of `params` parameters, for the sums of its gradients; 0 where the GPU has them."""
    return SUMS_STAGING_BYTES + params * work.weight_bytes if sums_in_host(work, gradients) else 0


def device_room(machine: Machine) -> float:
    """GPU memory of one rank that can be used."""
    return USABLE_DEVICE * machine.gpu_memory_bytes


def host_room(machine: Machine) -> float:
    """Host memory of one rank that can be used, by its framework too."""
    return USABLE_HOST * machine.host_memory_bytes / machine.gpus
