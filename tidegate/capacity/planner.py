"""Capacity planning: finds out whether a model fits on a machine, where its state is placed, and how long an
iteration takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tidegate.capacity.footprint import FRAMEWORK_HOST_BYTES, USABLE_DEVICE, USABLE_HOST, sums_in_host
from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.many_ranks import NodeShare, UpdatePrediction, predict_update
from tidegate.capacity.model_shapes import ModelShape
from tidegate.capacity.pass_times import PassTimes, passes
from tidegate.capacity.placement_fit import PlacementFit, Shortage, fit
from tidegate.errors import ConfigError
from tidegate.plan.ops import path_lanes
from tidegate.tuner.search import equation_stride

STRIDES: Final[tuple[float, ...]] = (8, 4, 3, 2, 1.5, 1.25, 1)
"""Strides that the planner tries in this order. It tries `off` before them, and the stride of Eq. 1 of Deep Optimizer
States after them."""
WORTHWHILE_FACTOR: Final = 0.97
"""Limit for choices that use more of the GPU or need a change of the training script: such a choice is accepted only
if its update takes less than this fraction of the shortest update so far."""
DAY_SECONDS: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class PathWear:
    """The wear of one storage path: bytes written per iteration and per day, by each node, or by all nodes if they
    share the path.

    days: days until its endurance is used up; None if the endurance is not known.
    """

    path: str
    bytes_per_iteration: float
    bytes_per_day: float
    days: float | None


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The result of capacity planning. Times are None when the model does not fit.

    phases: seconds of `forward`, `backward` and `update` in one iteration; forward and backward are estimates from the
    stated share of the GPU's peak, the update is simulated. state_bytes: bytes of all ranks, by residence. device_bytes
    and host_bytes: bytes of one GPU and of one node, by kind. bottleneck: the resource that the longest phase waits
    for: a lane, a path, `host memory`, `compute` or `collectives`. bound_share: utilisation of the busiest resource
    during the update; 1 where no schedule could be shorter.
    """

    model: ModelShape
    machine: Machine
    work: Workload
    fit: PlacementFit
    phases: Mapping[str, float]
    update: UpdatePrediction | None
    bottleneck: str
    state_bytes: Mapping[str, int]
    wear: tuple[PathWear, ...]

    @property
    def fits(self) -> bool:
        return not self.fit.shortages

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        return self.fit.shortages

    @property
    def iteration_seconds(self) -> float | None:
        return sum(self.phases.values()) if self.update is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks together; None when the model does not fit."""
        if self.iteration_seconds is None:
            return None
        work = self.work
        return work.sequence * work.microbatch * work.accumulation * self.machine.ranks / self.iteration_seconds

    @property
    def device_bytes(self) -> Mapping[str, float]:
        return self.fit.device

    @property
    def host_bytes(self) -> Mapping[str, float]:
        return {kind: nbytes * self.machine.gpus for kind, nbytes in self.fit.host.items()}

    @property
    def bound_share(self) -> float | None:
        return self.update.share_of_bound if self.update is not None else None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind the figures, as sentences."""
        return tuple(_assumptions(self))

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dictionary of plain values, which can be written as JSON."""
        effective = self.fit.effective
        return {
            "model": {**asdict(self.model), "params": self.model.params},
            "machine": {**asdict(self.machine), "ranks": self.machine.ranks},
            "work": asdict(self.work),
            "fits": self.fits,
            "shortages": [{**asdict(s), "missing_bytes": s.missing_bytes, "sentence": str(s)} for s in self.shortages],
            "knobs": {
                "stride": effective.stride,
                "static_ratio": effective.static_ratio,
                "host_cache_bytes": effective.host_cache_bytes,
                "gradients": self.fit.gradients,
            },
            "state_bytes": dict(self.state_bytes),
            "device_bytes": dict(self.device_bytes),
            "host_bytes": dict(self.host_bytes),
            "phases": dict(self.phases),
            "iteration_seconds": self.iteration_seconds,
            "tokens_per_second": self.tokens_per_second,
            "bottleneck": self.bottleneck,
            "busy_seconds": dict(self.update.busy) if self.update else {},
            "bound_share": self.bound_share,
            "wear": [asdict(wear) for wear in self.wear],
            "assumptions": list(self.assumptions),
        }


def plan_capacity(shape: ModelShape, machine: Machine, work: Workload | None = None) -> CapacityPlan:
    """Plans the placement of state and the stride, and predicts the time of an iteration. Equal arguments give equal
    results."""
    work = _sized(shape, machine, work or Workload())
    share, once = NodeShare(machine, work), passes(shape, machine, work)
    fits = [fit(shape, machine, work, "keep"), fit(shape, machine, work, "release")]
    usable = [placed for placed in fits if not placed.shortages]
    if not usable:
        return CapacityPlan(
            model=shape, machine=machine, work=work, fit=fits[-1], phases=_phases(once, work, None), update=None,
            bottleneck=fits[-1].shortages[0].where, state_bytes={}, wear=(),
        )  # fmt: skip
    found, update = _best_stride(*_cheapest_good_fit(usable, share, once.backward), share, once.backward)
    phases = _phases(once, work, update)
    longest = phases["update"] >= max(phases["forward"], phases["backward"])
    return CapacityPlan(
        model=shape, machine=machine, work=work, fit=found, phases=phases, update=update,
        bottleneck=update.bottleneck if longest else once.bottleneck,
        state_bytes={home: n * machine.ranks for home, n in found.state_bytes(share).items()},
        wear=tuple(_wear(machine, update, sum(phases.values()))),
    )  # fmt: skip


def _sized(shape: ModelShape, machine: Machine, work: Workload) -> Workload:
    """The workload, with smaller subgroups if a rank would have fewer than about sixteen. With few subgroups, lanes
    wait long for each other. ConfigError if there are fewer parameters than ranks."""
    of_rank = -(-shape.params // machine.ranks)
    if shape.params < machine.ranks:
        raise ConfigError(
            f"Model {shape.name} has {shape.params} parameters, fewer than the {machine.ranks} ranks: use fewer GPUs."
        )
    return replace(work, subgroup_numel=min(work.subgroup_numel, max(1, -(-of_rank // 16))))


def _cheapest_good_fit(
    fits: Sequence[PlacementFit], share: NodeShare, backward: float
) -> tuple[PlacementFit, UpdatePrediction]:
    """The best placement, and its predicted update with the stride `off`: the CPU updates all subgroups that are not
    residents. `fits` are in the order of their cost: a later placement is preferred to an earlier one only if its
    update takes less than WORTHWHILE_FACTOR times as long."""
    best: tuple[PlacementFit, UpdatePrediction] | None = None
    for candidate in fits:
        update = predict_update(candidate.rank, candidate.effective, share, backward_seconds=backward)
        if best is None or update.seconds < WORTHWHILE_FACTOR * best[1].seconds:
            best = (candidate, update)
    assert best is not None, "there is at least one"
    return best


def _best_stride(
    found: PlacementFit, update: UpdatePrediction, share: NodeShare, backward: float
) -> tuple[PlacementFit, UpdatePrediction]:
    """Chooses the stride. Returns the placement `found` with this stride, and the predicted update.

    update: the predicted update with the stride `off`. backward: seconds of the backward of one micro-batch. A stride
    is preferred to those tried before only if its update takes less than WORTHWHILE_FACTOR times as long.
    """
    strides = [*STRIDES, *equation_stride(found.rank.subgroups, share.card)] if found.may_stage else []
    for stride in dict.fromkeys(strides):
        # The bytes on a path are the same with every stride: if a path is the bottleneck, no stride helps.
        if (
            max((update.busy.get(path, 0.0) for path in found.rank.host_slots), default=0.0)
            > WORTHWHILE_FACTOR * update.seconds
        ):
            break
        candidate = replace(found, effective=replace(found.effective, stride=stride))
        its_update = predict_update(candidate.rank, candidate.effective, share, backward_seconds=backward)
        if its_update.seconds < WORTHWHILE_FACTOR * update.seconds:
            found, update = candidate, its_update
    return found, update


def _phases(once: PassTimes, work: Workload, update: UpdatePrediction | None) -> dict[str, float]:
    found = {"forward": once.forward * work.accumulation, "backward": once.backward * work.accumulation}
    return found if update is None else {**found, "update": update.seconds}


def _wear(machine: Machine, update: UpdatePrediction, iteration: float) -> Iterator[PathWear]:
    for path in machine.paths:
        _, lane = path_lanes(path.name)
        if not update.lane_bytes.get(lane):
            continue
        written = float(update.lane_bytes[lane] * (machine.ranks if path.all_nodes else machine.gpus))
        a_day = written * DAY_SECONDS / iteration
        days = path.endurance_bytes / a_day if path.endurance_bytes else None
        yield PathWear(path=path.name, bytes_per_iteration=written, bytes_per_day=a_day, days=days)


def _assumptions(plan: CapacityPlan) -> Iterator[str]:
    machine, work = plan.machine, plan.work
    yield (
        f"Weights, gradients and state are sharded over all {machine.ranks} ranks (ZeRO-3 or FSDP2), in subgroups of "
        f"{work.subgroup_numel / 1e6:,.0f} M parameters, {work.weight} weights, {work.state_bytes} bytes of state each."
    )
    yield (
        f"{USABLE_DEVICE:.0%} of GPU memory and {USABLE_HOST:.0%} of host memory can be used, of which each rank's "
        f"framework takes {FRAMEWORK_HOST_BYTES / 1e9:.0f} GB of the host."
    )
    if sums_in_host(work, plan.fit.gradients):
        yield (
            "Gradients of the micro-batches are summed in host memory, beside the backward: that their copies make it "
            "longer is not counted."
        )
    yield (
        f"A GPU reaches {machine.flop_share * machine.flops_per_second / 1e12:,.0f} TFLOP/s in training; collectives "
        f"run at {machine.node_link_bytes_per_second / 1e9:,.0f} GB/s within a node"
        + (
            f", {machine.fabric_bytes_per_second / 1e9:,.0f} GB/s for each GPU between nodes."
            if machine.nodes > 1
            else "."
        )
    )
    cpu = "this limits an update on the CPU" if machine.cpu_params_per_second is None else (
        f"an update on the CPU does {machine.cpu_params_per_second / 1e9:.2f} G parameters/s"
    )  # fmt: skip
    yield f"Host memory moves {machine.host_bytes_per_second / 1e9:,.0f} GB/s on each node, for everything; {cpu}."
    for path in machine.paths:
        whose = "all nodes together" if path.all_nodes else "each node"
        yield (
            f"Path {path.name} gives {whose} {path.read_bytes_per_second / 1e9:g} GB/s to read and "
            f"{path.write_bytes_per_second / 1e9:g} to write, " + ("at once." if path.duplex else "shared by both.")
        )
