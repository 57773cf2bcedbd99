"""Recommendations of the capacity planner: settings to change or hardware to buy, each planned and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from tidegate.capacity.machine import Machine, PlannedPath, Workload
from tidegate.capacity.planner import CapacityPlan, plan_capacity
from tidegate.errors import ConfigError

TYPICAL_NVME: Final = PlannedPath(name="nvme", read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9)
"""A typical NVMe drive: the node-local drives of MLP-Offload, Table 1."""
WORTHWHILE_GAIN: Final = 1.02
"""Smallest gain with which a change is recommended. The gain is tokens per second of each GPU with the change, divided
by those without it."""
MOST_NODES: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Change:
    """A recommended change of a setting, or a purchase of hardware, with the predicted seconds of an iteration.

    gain: tokens per second of each GPU with the change, divided by those without it; None if the model fits only with
    the change.
    """

    kind: Literal["change", "buy"]
    what: str
    iteration_seconds: float
    gain: float | None

    def __str__(self) -> str:
        brings = "then it fits" if self.gain is None else f"{self.gain:.2f} times as many tokens/s of each GPU"
        return f"{self.what}: {brings}, {self.iteration_seconds:,.3g} s an iteration"


class _Option(NamedTuple):
    kind: Literal["change", "buy"]
    what: str
    machine: Machine
    work: Workload


def best_changes(plan: CapacityPlan, count: int = 3) -> tuple[Change, ...]:
    """The `count` changes with the most tokens per second of each GPU, each simulated on its own; fewer if fewer reach
    the gain WORTHWHILE_GAIN. If the plan does not fit: the changes with which it fits."""
    found: list[tuple[float, Change]] = []
    for option in _options(plan):
        try:
            then = plan_capacity(plan.model, option.machine, option.work)
        except ConfigError:  # more ranks than parameters, more than a machine can have
            continue
        rate, now = _rate(then), _rate(plan)
        if rate is None or then.iteration_seconds is None or (now is not None and rate < WORTHWHILE_GAIN * now):
            continue
        change = Change(
            kind=option.kind,
            what=option.what,
            iteration_seconds=then.iteration_seconds,
            gain=None if now is None else rate / now,
        )
        found.append((rate, change))
    if not found and not plan.fits and (more := _enough_nodes(plan)) is not None:
        return (more,)
    return tuple(change for _, change in sorted(found, key=lambda pair: -pair[0])[:count])


def _rate(plan: CapacityPlan) -> float | None:
    return None if plan.tokens_per_second is None else plan.tokens_per_second / plan.machine.ranks


def _options(plan: CapacityPlan) -> Iterator[_Option]:
    machine, work = plan.machine, plan.work
    yield _Option("change", f"micro-batches of {2 * work.microbatch}", machine, _double_microbatch(work))
    if work.accumulation < 4:
        yield _Option("change", "4 micro-batches for each update", machine, replace(work, accumulation=4))
    if work.weight != "bfloat16":
        yield _Option("change", "bfloat16 weights", machine, replace(work, weight="bfloat16"))
    if not work.checkpointing:
        yield _Option("change", "activation checkpointing", machine, replace(work, checkpointing=True))
    for path in machine.paths:
        if not path.all_nodes:
            doubled = _two_drives(path)
            paths = tuple(doubled if other is path else other for other in machine.paths)
            yield _Option("buy", f"a second drive for path {path.name}", replace(machine, paths=paths), work)
    if all(path.all_nodes for path in machine.paths):
        more = replace(TYPICAL_NVME, name=_free_name(machine))
        yield _Option("buy", "NVMe of 6.9/5.3 GB/s", replace(machine, paths=(*machine.paths, more)), work)
    for what, name in (
        (f"twice the host memory ({2 * machine.host_memory_bytes / 1e9:,.0f} GB)", "host_memory_bytes"),
        (f"GPUs of twice the memory ({2 * machine.gpu_memory_bytes / 1e9:,.0f} GB)", "gpu_memory_bytes"),
        ("host memory of twice the speed", "host_bytes_per_second"),
    ):
        yield _Option("buy", what, replace(machine, **{name: 2 * getattr(machine, name)}), work)
    link = {name: 2 * getattr(machine, name) for name in ("h2d_bytes_per_second", "d2h_bytes_per_second")}
    yield _Option("buy", "GPU links of twice the speed", replace(machine, **link), work)
    if 2 * machine.nodes <= MOST_NODES:
        yield _Option("buy", f"{2 * machine.nodes} nodes", replace(machine, nodes=2 * machine.nodes), work)


def _double_microbatch(work: Workload) -> Workload:
    return replace(work, microbatch=2 * work.microbatch)


def _two_drives(path: PlannedPath) -> PlannedPath:
    """The path with a second, equal drive: twice the speed, capacity and endurance."""
    return replace(
        path,
        read_bytes_per_second=2 * path.read_bytes_per_second,
        write_bytes_per_second=2 * path.write_bytes_per_second,
        capacity_bytes=2 * path.capacity_bytes,
        endurance_bytes=2 * path.endurance_bytes,
    )


def _free_name(machine: Machine) -> str:
    taken = {path.name for path in machine.paths}
    return next(name for name in ("nvme", *(f"nvme{i}" for i in range(2, 99))) if name not in taken)


def _enough_nodes(plan: CapacityPlan) -> Change | None:
    """The purchase of enough nodes for the model. Their number is doubled until the model fits; None if it does not fit
    on up to MOST_NODES nodes."""
    machine = plan.machine
    while 2 * machine.nodes <= MOST_NODES:
        machine = replace(machine, nodes=2 * machine.nodes)
        try:
            then = plan_capacity(plan.model, machine, plan.work)
        except ConfigError:  # fewer parameters than ranks
            return None
        if then.iteration_seconds is not None:
            what = f"{machine.nodes} nodes of {machine.gpus} GPUs"
            return Change(kind="buy", what=what, iteration_seconds=then.iteration_seconds, gain=None)
    return None
