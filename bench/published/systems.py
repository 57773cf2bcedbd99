"""Models of the papers' systems: plans of Tidegate's planner, simulated on the papers' machines.

ZeRO-3 and TwinFlow use the policy `twinflow`: one op at a time. Deep Optimizer States is `interleaved` with a stride.
With storage, ZeRO-3 has one path and no cache; it reads 16 bytes per parameter (fp32 gradients and state) and writes
12. MLP-Offload has both paths, a tier split by Eq. 1 of its paper, alternating order and a cache; it reads and writes
12 bytes per parameter. State is fp32 in all systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

from tidegate.capacity.footprint import USABLE_HOST, subgroups_of
from tidegate.capacity.machine import GB, Machine, Workload
from tidegate.capacity.many_ranks import NodeShare, run
from tidegate.capacity.model_shapes import ModelShape
from tidegate.capacity.pass_times import passes
from tidegate.knobs.knobs import EQ1, OFF, Off
from tidegate.plan import make_plan, place_subgroups, steady_placements
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import times_together
from tidegate.simulator.steady_state import Rank, sampled, steady_steps

DEEPSPEED_BYTES: Final = 28
"""Bytes per parameter of host memory traffic of DeepSpeed's update on the CPU: weight and both moments, read and
written in fp32, and the fp32 gradient."""
DOWNSCALED_BYTES: Final = DEEPSPEED_BYTES + 6
"""Bytes per parameter of host memory traffic of an update on the CPU with a second pass, which reads the new fp32
weight again and writes it in 16 bits (DOS 4.2, D_c)."""
JLSE_DEVICE: Final = 100e9 / 4
"""Parameters per second that one H100 updates. DOS 1 states 100 G/s for four GPUs; MLP 4.2 states 40 G/s for four."""
JLSE_COPY: Final = 12e9 / 4 * 2
"""Bytes per second of new 16-bit weights to one GPU, first downscaled and then copied (DOS 1: 12 G parameters/s for
four GPUs)."""
JLSE_GRADIENT: Final = 4e9
"""Bytes per second of 16-bit gradients from one GPU into fp32 buffers of the host (DOS Table 1, G16 to H32)."""
FP16: Final = Workload(weight="float16")
"""The workload of both papers: 16-bit weights, and 12 bytes of fp32 state per parameter."""


class Iteration(NamedTuple):
    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Setting:
    """What is simulated: a model on a machine, and the speeds of the training system.

    device: parameters per second that one GPU updates. copy, gradient: bytes per second of one GPU in DeepSpeed, for
    new weights to the GPU and for gradients to the host; DeepSpeed does both one after the other. pinned_cache: whether
    the host cache keeps the same subgroups in every step; if False, the order of updates alternates.
    """

    model: ModelShape
    machine: Machine
    microbatch: int = 1
    accumulation: int = 1
    device: float = JLSE_DEVICE
    copy: float = JLSE_COPY
    gradient: float = JLSE_GRADIENT
    pinned_cache: bool = False

    @property
    def work(self) -> Workload:
        return replace(FP16, microbatch=self.microbatch, accumulation=self.accumulation)

    @property
    def of_rank(self) -> int:
        return -(-self.model.params // self.machine.ranks)

    def iteration(self, gradients: float, update: float) -> Iteration:
        """The times of an iteration whose update takes `update` seconds. gradients: seconds by which gradients make the
        last backward longer."""
        once = passes(self.model, self.machine, self.work)
        n = self.accumulation
        return Iteration(n * once.forward, n * once.backward + gradients, update)


@cache
def twinflow(s: Setting, ratio: float = 0.0, *, gradients_wait: bool = True) -> Iteration:
    """The simulated iteration of DeepSpeed's TwinFlow with the static ratio `ratio`; with 0, of ZeRO-3 with all state
    in host memory. gradients_wait: whether copies of gradients block the backward."""
    share = _share(s, DEEPSPEED_BYTES)
    subgroups = subgroups_of(s.of_rank, s.work)
    placed = steady_placements(place_subgroups(len(subgroups), stride=OFF, static_ratio=ratio))
    plan = make_plan(subgroups, placed, num_slots=0, policy="twinflow")

    def seconds(op: Op) -> float:
        return op.nbytes / s.copy if op.kind is OpKind.WEIGHT_H2D else _seconds(s, share)(op)

    waits = sum(op.nbytes for op in plan.of_kind(OpKind.GRAD_D2H)) / s.gradient if gradients_wait else 0.0
    return s.iteration(waits, run(plan, seconds, share, _LONG)[0])


@cache
def deep_optimizer_states(s: Setting, stride: float | Off = 2, ratio: float = 0.0) -> Iteration:
    """The simulated iteration of Deep Optimizer States: Tidegate's planner interleaves the updates, and state is fp32.
    ratio: static ratio. The CPU converts new weights to 16 bits in a second pass."""
    share = _share(s, DOWNSCALED_BYTES)
    subgroups = subgroups_of(s.of_rank, s.work)
    plan = make_plan(
        subgroups, steady_placements(place_subgroups(len(subgroups), stride=stride, static_ratio=ratio)), num_slots=2
    )
    return s.iteration(0.0, run(plan, _seconds(s, share), share, _LONG)[0])


class Stored(NamedTuple):
    """An iteration with storage.

    read, write: GB/s of the node while it reads and writes. effective_io: GB/s of the node as MLP 4.3 defines it: bytes
    read and written of all subgroups, divided by the times of reads and writes.
    """

    iteration: Iteration
    read: float
    write: float
    effective_io: float


@cache
def zero3_nvme(s: Setting) -> Stored:
    """The simulated iteration of ZeRO-3 with all state on NVMe. Gradients are written to NVMe in fp32 during the
    backward, and read with the state during the update."""
    nvme = s.machine.by_name["nvme"]
    one = replace(s, machine=replace(s.machine, paths=(nvme,)))
    written = 4.0 * one.of_rank * s.machine.gpus / nvme.write_bytes_per_second
    alone = passes(s.model, s.machine, s.work).backward
    found = _stored(one, EffectiveKnobs(OFF, 0.0), read_bytes=16)
    # The last backward computes while gradients are written: what is longer counts.
    return found._replace(iteration=s.iteration(max(0.0, written - alone), found.iteration.update))


@cache
def mlp_offload(s: Setting, *, paths: tuple[str, ...] = ("nvme", "pfs")) -> Stored:
    """The simulated iteration of MLP-Offload with these paths: 16-bit gradients in host memory, a cache in the host
    memory that the training process leaves free, and a tier split by Eq. 1 of the paper."""
    machine = replace(s.machine, paths=tuple(s.machine.by_name[name] for name in paths))
    cache = int(cache_bytes(s) / machine.gpus)
    knobs = EffectiveKnobs(OFF, 0.0, tier_split=EQ1, host_cache_bytes=cache, alternate=not s.pinned_cache)
    return _stored(replace(s, machine=machine), knobs, read_bytes=12)


def cache_bytes(s: Setting) -> float:
    """Host memory of a node for the cache, in bytes: 90 % of the node's memory, without the memory of the runtime (the
    training processes) and without the host slots of each process.

    The runtime takes 250 to 350 GB by model size (MLP 4.3), assumed linear from 40 to 120 G parameters per node.
    """
    of_node = s.of_rank * s.machine.gpus / 1e9
    runtime = 250 + 100 * min(1.0, max(0.0, (of_node - 40) / 80))
    slots = s.machine.gpus * s.work.host_slots * s.work.subgroup_numel * s.work.state_bytes
    return max(0.0, USABLE_HOST * s.machine.host_memory_bytes - runtime * GB - slots)


_LONG: Final = 1e6
"""Length in seconds of a simulated backward during which all early copies can end. The time by which gradient copies
make the real backward longer is added separately."""


def _share(s: Setting, cpu_bytes: int) -> NodeShare:
    """The share of one rank in its node. cpu_bytes: host memory traffic of an update on the CPU, in bytes per
    parameter. The time of the update is proportional to it, so that a second pass makes the update longer."""
    rate = (s.machine.cpu_params_per_second or 0.0) * DEEPSPEED_BYTES / cpu_bytes
    return NodeShare(replace(s.machine, cpu_params_per_second=rate), s.work, cpu_bytes)


def _seconds(s: Setting, share: NodeShare) -> Callable[[Op], float]:
    card = replace(share.card, device_params_per_second=s.device)
    return card.seconds


def _stored(s: Setting, knobs: EffectiveKnobs, *, read_bytes: int) -> Stored:
    share = _share(s, DEEPSPEED_BYTES)
    slots = {path.name: s.work.host_slots for path in s.machine.paths}
    rank = Rank(subgroups_of(s.of_rank, s.work), 0, slots, "release")
    few, smaller, scale = sampled(rank, knobs)
    update, reads, writes, read, written = 0.0, 0.0, 0.0, 0, 0
    steps = steady_steps(few, smaller, share.card)
    for step in steps:
        plan = _with_read_bytes(step.plan(share.card), read_bytes)
        # Nothing is fetched before the step: both systems begin to fetch with the update.
        [(starts, ends)] = times_together(
            [plan],
            _seconds(s, share),
            lambda op: _LONG if op.gate == "step" or op.kind is OpKind.FETCH else 0.0,
            share.card.keeps,
            share.demand,
        )
        update += (max(ends.values()) - _LONG) / len(steps)
        for op in plan.of_kind(OpKind.FETCH):
            reads += ends[op.id] - starts[op.id]
            read += op.nbytes
        for op in plan.of_kind(OpKind.FLUSH):
            writes += ends[op.id] - starts[op.id]
            written += op.nbytes
    n, paths = s.machine.gpus, len(slots)
    everything = sum(sub.numel for sub in few.subgroups) * (read_bytes + 12) * len(steps)
    return Stored(
        iteration=s.iteration(0.0, update * scale),
        read=n * read * paths / reads / 1e9,
        write=n * written * paths / writes / 1e9,
        effective_io=n * everything * paths / (reads + writes) / 1e9,
    )


def _with_read_bytes(plan: Plan, of_param: int) -> Plan:
    numel = {sub.id: sub.numel for sub in plan.subgroups}
    return replace(
        plan,
        ops=tuple(
            replace(op, nbytes=of_param * numel[op.subgroup]) if op.kind is OpKind.FETCH else op for op in plan.ops
        ),
    )
