"""Placement of state for the capacity planner: fills GPU memory, then host memory, then storage paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tidegate.capacity.footprint import (
    FRAMEWORK_HOST_BYTES,
    device_bytes,
    device_room,
    host_room,
    subgroups_of,
    sums_bytes,
)
from tidegate.capacity.machine import Machine, Workload
from tidegate.capacity.many_ranks import NodeShare
from tidegate.capacity.model_shapes import ModelShape
from tidegate.knobs.knobs import OFF
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Subgroup
from tidegate.plan.residency import GradientBudget
from tidegate.plan.slot_sizes import device_slot_bytes
from tidegate.simulator.steady_state import Rank, SteadyStep, steady_steps


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A lack of memory or storage: the bytes that are needed, and the bytes that are available.

    where: `GPU memory` (both numbers are per GPU), `host memory` (per node), or `storage paths` (of all ranks).
    """

    where: str
    needed_bytes: float
    available_bytes: float

    @property
    def missing_bytes(self) -> float:
        return self.needed_bytes - self.available_bytes

    def __str__(self) -> str:
        needed, available = self.needed_bytes / 1e9, self.available_bytes / 1e9
        return (
            f"{self.where}: {needed:,.1f} GB are needed, {available:,.1f} GB can be used: {needed - available:,.1f} GB "
            "are missing"
        )


@dataclass(frozen=True, kw_only=True)
class PlacementFit:
    """The placement of all data of one rank: on the GPU, in host memory and on storage paths, filled in this order. If
    one of these is too small (`shortages`), those after it are not computed.

    device, host: bytes of one rank in GPU memory and in host memory, by kind of data. effective: the knobs; `fit` sets
    the stride to `off`, and the planner may choose another stride if `may_stage` is True. may_stage: some state is not
    on the GPU, and the GPU has room for staging slots (the buffers into which such state is copied for an update on the
    GPU).
    """

    rank: Rank
    effective: EffectiveKnobs
    gradients: Literal["keep", "release"]
    device: Mapping[str, float]
    host: Mapping[str, float]
    shortages: tuple[Shortage, ...] = ()
    may_stage: bool = True

    def state_bytes(self, share: NodeShare) -> dict[str, int]:
        """Bytes of this rank's state between two steps, by residence."""
        nbytes: Counter[str] = Counter()
        for s, p in zip(
            self.rank.subgroups, steady_steps(self.rank, self.effective, share.card)[0].placements, strict=True
        ):
            nbytes[p.after] += s.nbytes("state")
        return dict(nbytes)


def fit(
    shape: ModelShape, machine: Machine, work: Workload, gradients: Literal["keep", "release"] = "keep"
) -> PlacementFit:
    """Places as much state on the GPU as fits, the rest in host memory, and the excess on storage paths.

    gradients: `release` leaves more free memory on the GPU, and needs some host memory for gradient sums.
    """
    share, is_released = NodeShare(machine, work), gradients == "release"
    subgroups = subgroups_of(-(-shape.params // machine.ranks), work)
    # A released gradient of a subgroup that lives on the GPU stays there until the update.
    resident = [s.nbytes("state") + is_released * s.nbytes("gradient") for s in subgroups]
    slots = work.num_slots * sum(device_slot_bytes(subgroups, gradients=is_released))
    room = device_room(machine)
    device = device_bytes(shape, machine, work, gradients)
    rank = Rank(subgroups, work.num_slots, {}, gradients)
    free = room - sum(device.values())
    if free < 0:
        short = Shortage(where="GPU memory", needed_bytes=sum(device.values()), available_bytes=room)
        return PlacementFit(
            rank=rank,
            effective=EffectiveKnobs(OFF, 0.0),
            gradients=gradients,
            device=device,
            host={},
            shortages=(short,),
        )
    may_stage = free >= slots
    ratio = 1.0 if free >= sum(resident) else _readable_ratio((free - may_stage * slots) // resident[0], len(subgroups))
    effective = EffectiveKnobs(OFF, ratio)
    step = steady_steps(rank, effective, share.card)[0]
    on_device = [s for s, placement in zip(subgroups, step.placements, strict=True) if placement.after == "device"]
    device = {
        **device,
        "state": float(sum(s.nbytes("state") for s in on_device)),
        "slots": float(slots) if may_stage and ratio < 1 else 0.0,
    }
    if is_released:
        # The free memory is used for gradients, so that fewer of them are spilled.
        left = room - sum(device.values())
        device["gradients"] = min(device["gradients"] + left, float(sum(s.nbytes("gradient") for s in subgroups)))
        budget = GradientBudget(int(machine.gpu_memory_bytes), int(device["gradients"]))
        rank = replace(rank, gradient_budget=budget)
    base = PlacementFit(
        rank=rank, effective=effective, gradients=gradients, device=device, host={}, may_stage=may_stage and ratio < 1
    )
    return _on_host(base, share)


def _on_host(found: PlacementFit, share: NodeShare) -> PlacementFit:
    """Places the state that is not on the GPU: in host memory if it fits or there are no paths, else also on paths.

    found: the placement on the GPU.
    """
    room, machine = host_room(share.machine), share.machine
    host = _host_bytes(found.rank, found.effective, share)
    if sum(host.values()) <= room:
        return replace(found, host=host)
    placements = steady_steps(found.rank, found.effective, share.card)[0].placements
    stored = [s for s, p in zip(found.rank.subgroups, placements, strict=True) if p.after != "device"]
    if not machine.paths or not stored:
        return replace(found, host=host, shortages=(_host_shortage(host, room, machine),))
    capacity = _capacity(found.rank.subgroups[0], share)
    # A path that cannot hold one subgroup is of no use.
    usable = [path.name for path in machine.paths if capacity.get(path.name) != 0]
    unit = stored[0].nbytes("state")
    if not usable:
        whole = float(len(stored) * unit * machine.ranks)
        return replace(
            found, host=host, shortages=(Shortage(where="storage paths", needed_bytes=whole, available_bytes=0.0),)
        )
    capacity = {name: most for name, most in capacity.items() if most}
    rank = replace(found.rank, host_slots=dict.fromkeys(usable, share.work.host_slots), capacity=capacity)
    unlimited = replace(rank, capacity={})
    least = _host_bytes(unlimited, found.effective, share)
    if sum(least.values()) > room:
        return replace(found, rank=rank, host=least, shortages=(_host_shortage(least, room, machine),))
    one = _host_bytes(unlimited, replace(found.effective, host_cache_bytes=unit), share)
    each = max(1.0, sum(one.values()) - sum(least.values()))
    cached = min(len(stored) - 1, int((room - sum(least.values())) // each))
    effective = replace(found.effective, host_cache_bytes=cached * unit)
    kept = replace(found, rank=rank, effective=effective, host=_host_bytes(unlimited, effective, share))
    takes = sum(capacity.get(name, len(stored)) for name in usable)
    if takes < len(stored) - cached:
        short = Shortage(
            where="storage paths",
            needed_bytes=float((len(stored) - cached) * unit * machine.ranks),
            available_bytes=float(takes * unit * machine.ranks),
        )
        return replace(kept, shortages=(short,))
    return kept


def _capacity(subgroup: Subgroup, share: NodeShare) -> dict[str, int]:
    """The number of subgroups of one rank that fit on each path, by path; paths of unlimited capacity are left out.

    subgroup: a subgroup of full size.
    """
    machine = share.machine
    return {
        path.name: int(path.capacity_bytes / (machine.ranks if path.all_nodes else machine.gpus))
        // subgroup.nbytes("state")
        for path in machine.paths
        if path.capacity_bytes
    }


def _host_shortage(host: Mapping[str, float], room: float, machine: Machine) -> Shortage:
    return Shortage(
        where="host memory", needed_bytes=sum(host.values()) * machine.gpus, available_bytes=room * machine.gpus
    )


def _host_bytes(rank: Rank, effective: EffectiveKnobs, share: NodeShare) -> dict[str, float]:
    """Host memory of one rank in bytes, by kind of data, if all subgroups that are not residents are updated on the
    CPU. With any stride, the rank needs at most this memory."""
    steps: list[SteadyStep] = steady_steps(rank, effective, share.card)
    found = max((step.host_bytes() for step in steps), key=lambda kinds: sum(kinds.values()))
    sums = sums_bytes(sum(s.numel for s in rank.subgroups), share.work, rank.gradients)
    whole = {**found, **({"sums": sums} if sums else {}), "framework": FRAMEWORK_HOST_BYTES}
    return {kind: float(nbytes) for kind, nbytes in whole.items()}


def _readable_ratio(count: float, of: int) -> float:
    """The static ratio with which `count` subgroups out of `of` are residents, rounded down to four decimals so that it
    is easy to read."""
    return int(10_000 * max(0.0, count) / of) / 10_000
