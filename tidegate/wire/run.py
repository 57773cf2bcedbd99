"""Runs and their ranks, as operators see them."""

from __future__ import annotations

from tidegate.wire.base import (
    Count,
    DeviceKind,
    KnobChanges,
    Label,
    Liveness,
    Message,
    Rank,
    RunName,
    Seconds,
    Sum,
    SumBy,
)
from tidegate.wire.step import StepReport


class RankView(Message):
    rank: Rank
    agent: Label
    host: Label
    pid: Count
    device_kind: DeviceKind
    metrics_address: str
    liveness: Liveness
    last_seen: float
    started_at: float
    phase: Label
    step: Count
    applied_generation: Count
    effective: KnobChanges
    last_step: StepReport | None = None
    predicted_update_seconds: Seconds | None = None
    """What the rank's simulator expects of the next update; None until it has measured its rates."""
    device_memory_bytes: Count | None = None
    """What its device has in all; None where that is not known."""


class RunTotals(Message):
    """One step over all ranks that are there: the newest that each of them has told. Times are the slowest rank's."""

    step: Count
    ranks: Count
    step_seconds: Seconds
    """Forward, backward and update."""
    update_seconds: Seconds
    slowest_rank: Rank
    """The one whose step took longest."""
    exposed_seconds: Seconds
    tokens: Sum | None = None
    """Sums over ranks, as all that follow; None where no rank tells."""
    link_bytes: SumBy = {}
    """By direction."""
    path_bytes: dict[Label, SumBy] = {}
    """By path and operation."""
    host_memory_bytes: SumBy = {}
    """By kind."""
    update_params: SumBy = {}
    """By processor."""


class RunView(Message):
    run: RunName
    liveness: Liveness
    """The worst of its ranks; finished when all said goodbye."""
    device_kind: DeviceKind
    world_size: Count
    step: Count
    generation: Count
    started_at: float
    last_seen: float
    paths: tuple[str, ...] = ()
    """Names of the storage paths of its ranks."""
    totals: RunTotals | None = None
    """None until all ranks have told of one step."""
    ranks: tuple[RankView, ...]


class StepsView(Message):
    """The newest steps of one rank, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[StepReport, ...]


class TimelinesView(Message):
    """The steps of one rank whose timelines the daemon has, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[int, ...]
