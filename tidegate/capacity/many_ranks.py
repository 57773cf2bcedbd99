"""Prediction of an update with many ranks: simulates one rank with its share of the node's paths, cores and memory.

Ranks of a job hold equal shares of the state and make equal plans. Under fair sharing they do the same at the same
time, so that it is enough to simulate one rank with its share of the node: 512 ranks take no longer to simulate than
one. (`times_together` can simulate several ranks at once; a test compares both.) Ranks are assumed to work in the same
rhythm. Exclusive access to a path lets them take turns instead; this is not simulated. It changes the times of single
ranks but not the total throughput, because while one rank waits, another rank uses the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tidegate.capacity.machine import Machine, Workload
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.interference import DUPLEX, HALF_DUPLEX, Demand
from tidegate.plan.ops import D2H, DEVICE, H2D, LANES, Op, OpKind, path_lanes
from tidegate.plan.plan import Plan
from tidegate.plan.tier_split import PathSpeeds
from tidegate.rules.rule import find
from tidegate.simulator.event_loop import times_together
from tidegate.simulator.steady_state import Rank, SteadyStep, sampled, steady_steps
from tidegate.speeds.rate_card import RateCard

MEMORY: Final = "host memory"
"""Name of a shared resource: the memory bandwidth of the host, reads plus writes. All updates on the CPU and all copies
use it."""
_STREAMED: Final = 0.7
"""Share of the GPU's peak memory bandwidth that an update reaches. It is below 1, because an update reads and writes
many arrays at the same time."""
_VECTOR_SHARE: Final = 1 / 16
"""Speed of a GPU's fp32 operations outside of matrices, as a share of its peak on 16-bit matrices. A100: 19.5 of 312
teraflops; H100: 67 of 989."""


@dataclass(frozen=True)
class NodeShare:
    """The share of one rank in the resources of its node, and in paths that all nodes use. It is assumed that all other
    ranks do the same work at the same time.

    cpu_bytes: bytes per parameter that an update on the CPU reads and writes in host memory; 0 for the value of
    Tidegate's own update (`touched_bytes`).
    """

    machine: Machine
    work: Workload
    cpu_bytes: int = 0

    @cached_property
    def touched_bytes(self) -> int:
        """Memory traffic of Tidegate's update in bytes per parameter: state and weight are read and written, the
        gradient (of the weight's size) is read."""
        return 2 * self.work.state_bytes + 3 * self.work.weight_bytes

    @cached_property
    def memory_bytes_per_second(self) -> float:
        """Host memory bandwidth of one rank."""
        return self.machine.host_bytes_per_second / self.machine.gpus

    @cached_property
    def card(self) -> RateCard:
        """The rate card of this rank: the speed of each lane while the rank's other lanes are idle, and all other ranks
        use the same kind of lane."""
        machine = self.machine
        on_cpu = machine.cpu_params_per_second or machine.host_bytes_per_second / (self.cpu_bytes or self.touched_bytes)
        on_device = _STREAMED * machine.device_bytes_per_second
        computed = _VECTOR_SHARE * machine.flops_per_second / find(self.work.rule).flops_per_param
        speeds = {}
        for path in machine.paths:
            ranks = machine.ranks if path.all_nodes else machine.gpus
            speeds[path.name] = PathSpeeds(
                read_bytes_per_second=path.read_bytes_per_second / ranks,
                write_bytes_per_second=path.write_bytes_per_second / ranks,
                factors=DUPLEX if path.duplex else HALF_DUPLEX,
            )
        return RateCard(
            h2d_bytes_per_second=machine.h2d_bytes_per_second,
            d2h_bytes_per_second=machine.d2h_bytes_per_second,
            cpu_params_per_second=on_cpu / machine.gpus,
            device_params_per_second=min(on_device / self.touched_bytes, computed),
            norm_params_per_second=on_device / self.work.weight_bytes,
            overhead_seconds=0.0,
        ).with_paths(speeds)

    def demand(self, op: Op) -> Demand:
        """The share of each shared resource that `op` uses at the full speed of its lane. A GPU and its link belong to
        one rank and are not shared."""
        seconds = self.card.seconds(op)
        if seconds <= 0 or op.lane == DEVICE:
            return {}
        on_cpu = self.cpu_bytes or self.touched_bytes
        moved = op.numel * on_cpu if op.kind is OpKind.CPU_UPDATE else op.nbytes
        memory = {MEMORY: moved / seconds / self.memory_bytes_per_second}
        return memory if op.lane in (H2D, D2H) else {**memory, op.lane: 1.0}


@dataclass(frozen=True, kw_only=True)
class UpdatePrediction:
    """The predicted update of one rank. If the order of updates alternates between steps, each value is the mean of two
    steps, one in each order.

    seconds: from the call of `step()` until all ops are done. busy: for each resource, its seconds of work at full
    speed within that time; resources are the lanes, `host memory`, and each path whose reads and writes share one
    drive. lane_bytes: bytes that each lane moves in the whole step.
    """

    seconds: float
    busy: Mapping[str, float]
    lane_bytes: Mapping[str, int]

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for longest."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def share_of_bound(self) -> float:
        """Utilisation of the busiest resource: its seconds of work divided by the seconds of the update. 1: no schedule
        could be shorter."""
        return min(1.0, self.busy[self.bottleneck] / self.seconds) if self.seconds > 0 else 1.0


def predict_update(
    rank: Rank, effective: EffectiveKnobs, share: NodeShare, *, backward_seconds: float = 0.0
) -> UpdatePrediction:
    """Predicts the update of `rank` under these knobs in the steady state, while all other ranks of the machine run,
    too.

    backward_seconds: length of the last micro-batch's backward, in which early copies and fetches run. If there are
    many subgroups, a sample is simulated, with a backward that is shorter in the same ratio.
    """
    few, smaller, scale = sampled(rank, effective)
    steps = steady_steps(few, smaller, share.card)
    seconds, busy = 0.0, defaultdict[str, float](float)
    for step in steps:
        backward = backward_seconds / scale
        elapsed, used = run(step.plan(share.card, backward), share.card.seconds, share, backward)
        seconds += elapsed * scale / len(steps)
        for resource, work in used.items():
            busy[resource] += work * scale / len(steps)
    whole = steps if few is rank else steady_steps(rank, effective, share.card)
    return UpdatePrediction(seconds=seconds, busy=dict(busy), lane_bytes=_mean_bytes(whole))


def run(
    plan: Plan, seconds_of: Callable[[Op], float], share: NodeShare, step_at: float
) -> tuple[float, dict[str, float]]:
    """Simulates `plan`. Returns the seconds of the update (from the call of `step()` until all ops are done), and the
    seconds of work of each resource within this time.

    seconds_of: gives the run time of an op at full speed. step_at: the time of the call of `step()`, in seconds after
    the start of the plan.
    """
    seconds = {op.id: seconds_of(op) for op in plan.ops}
    demands = {op.id: share.demand(op) for op in plan.ops}
    [(starts, ends)] = times_together(
        [plan],
        lambda op: seconds[op.id],
        lambda op: step_at if op.gate == "step" else 0.0,
        share.card.keeps,
        lambda op: demands[op.id],
    )
    busy = defaultdict[str, float](float, dict.fromkeys(LANES, 0.0))
    for op in plan.ops:
        elapsed = ends[op.id] - starts[op.id]
        late = max(0.0, ends[op.id] - max(step_at, starts[op.id])) / elapsed if elapsed > 0 else 0.0
        for resource, part in ({op.lane: 1.0} | dict(demands[op.id])).items():
            busy[resource] += late * part * seconds[op.id]
    used = {op.path for op in plan.ops}
    shared = [path.name for path in share.machine.paths if path.name in used and not path.duplex]
    busy |= {path: sum(busy[lane] for lane in path_lanes(path)) for path in shared}
    return max(step_at, *ends.values()) - step_at, dict(busy)


def _mean_bytes(steps: list[SteadyStep]) -> dict[str, int]:
    moved = [step.lane_bytes() for step in steps]
    return {lane: sum(bytes_of[lane] for bytes_of in moved) // len(moved) for lane in moved[0]}
