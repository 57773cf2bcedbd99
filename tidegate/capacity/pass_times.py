"""Times of the forward and backward pass of one micro-batch on a sharded model.

Rough estimates, used only to find the share of an iteration that the update takes. Compute: 2 floating-point operations
per parameter and token in the forward, twice as many in the backward, and 2 more where activations are computed again.
Collectives: ZeRO-3 gathers all weights in each pass and reduces all gradients; they run at the same time as the
compute.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.model_shapes import ModelShape


class PassTimes(NamedTuple):
    """Seconds of the forward and the backward of one micro-batch, and their bottleneck: `compute` or `collectives`."""

    forward: float
    backward: float
    bottleneck: str


def passes(shape: ModelShape, machine: Machine, work: Workload) -> PassTimes:
    """Estimates the seconds of the forward and the backward of one micro-batch on each rank."""
    compute = forward_flops(shape, work) / (machine.flops_per_second * machine.flop_share)
    gather = gather_seconds(shape.params * work.weight_bytes, machine)
    again = 3 if work.checkpointing else 2
    # The backward gathers weights once more and scatters as many gradients.
    forward, backward = max(compute, gather), max(again * compute, 2 * gather)
    return PassTimes(forward, backward, "collectives" if again * compute < 2 * gather else "compute")


def forward_flops(shape: ModelShape, work: Workload) -> float:
    """Floating-point operations of the forward of one micro-batch: the matrices, and causal attention (half of the
    sequence × sequence square)."""
    tokens = work.sequence * work.microbatch
    return 2.0 * shape.active_params * tokens + 2.0 * shape.layers * shape.hidden * work.sequence * tokens


def gather_seconds(nbytes: float, machine: Machine) -> float:
    """Seconds of a ring all-gather of `nbytes`, of which each rank holds an equal share: the longer of the transfers
    within a node and between nodes."""
    within = nbytes * (machine.ranks - 1) / machine.ranks / machine.node_link_bytes_per_second
    between = nbytes * (machine.nodes - 1) / machine.nodes / (machine.gpus * machine.fabric_bytes_per_second)
    return max(within, between)
