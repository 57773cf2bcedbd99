"""Forward and backward of one micro-batch on a sharded model: floating-point work beside the collectives.

Estimates, for what share of an iteration the update is. Work: 2 operations a parameter and token forwards, twice that
backwards, once more where activations are computed again. Collectives: ZeRO-3 gathers all weights in each pass and
reduces all gradients; they run beside the work.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.model_shapes import ModelShape


class Pass(NamedTuple):
    """Seconds of one micro-batch, and whether the work or the collectives decide them."""

    forward: float
    backward: float
    bottleneck: str


def passes(shape: ModelShape, machine: Machine, work: Workload) -> Pass:
    """What one micro-batch takes on each rank."""
    compute = forward_flops(shape, work) / (machine.flops_per_second * machine.flop_share)
    gather = gather_seconds(shape.params * work.weight_bytes, machine)
    again = 3 if work.checkpointing else 2
    # The backward gathers weights once more and scatters as many gradients.
    forward, backward = max(compute, gather), max(again * compute, 2 * gather)
    return Pass(forward, backward, "collectives" if again * compute < 2 * gather else "compute")


def forward_flops(shape: ModelShape, work: Workload) -> float:
    """Floating-point operations of the forward of one micro-batch: matrices, and attention over half the square."""
    tokens = work.sequence * work.microbatch
    return 2.0 * shape.active_params * tokens + 2.0 * shape.layers * shape.hidden * work.sequence * tokens


def gather_seconds(nbytes: float, machine: Machine) -> float:
    """Seconds in which every rank gets `nbytes` of which each holds an equal share, over rings."""
    within = nbytes * (machine.ranks - 1) / machine.ranks / machine.node_link_bytes_per_second
    between = nbytes * (machine.nodes - 1) / machine.nodes / (machine.gpus * machine.fabric_bytes_per_second)
    return max(within, between)
