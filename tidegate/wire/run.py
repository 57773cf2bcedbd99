"""Messages about runs and their ranks, for operators."""

from __future__ import annotations

from typing import Final, Literal

from tidegate.wire.base import (
    Count,
    DeviceKind,
    ErrorName,
    Flag,
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

BROKEN_SECONDS: Final = 86_400.0
"""Time since the last message of a broken run for which it is news."""


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
    """The rank's own prediction of the next update; None until the rank has measured its rates."""
    device_memory_bytes: Count | None = None
    """Memory capacity of the rank's device; None where that is not known."""


class RunTotals(Message):
    """Totals over all present ranks (live or stale) of the newest step that all of them have reported. Each time is the
    longest of any rank."""

    step: Count
    ranks: Count
    step_seconds: Seconds
    """Seconds of forward, backward and update together."""
    update_seconds: Seconds
    slowest_rank: Rank
    """The rank with the longest step."""
    exposed_seconds: Seconds
    tokens: Sum | None = None
    """Tokens, summed over ranks; None if no rank reports tokens."""
    link_bytes: SumBy = {}
    """Bytes on the link, summed over ranks, by direction."""
    path_bytes: dict[Label, SumBy] = {}
    """Bytes read and written, summed over ranks, by path and operation."""
    host_memory_bytes: SumBy = {}
    """Bytes of host memory, summed over ranks, by kind."""
    update_params: SumBy = {}
    """Updated parameters, summed over ranks, by processor."""


class Breakdown(Message):
    """How a run broke down: a rank failed (an exception ended it), or no rank was left and one at least was lost. The
    run stays broken until a rank that has registered since then has finished a step."""

    at: float
    rank: Rank
    """The rank that failed first; if none failed, the last one that was lost."""
    step: Count
    """The last step of that rank."""
    error: ErrorName = ""
    """Name of the type of the exception; empty if no rank failed."""
    lost: Flag = False
    """Whether no rank was left and one at least was lost; ranks that were started again may have failed since."""

    @property
    def liveness(self) -> Literal["failed", "lost"]:
        """Liveness of the run while no rank is there."""
        return "failed" if self.error else "lost"


class RunView(Message):
    run: RunName
    liveness: Liveness
    """The worst liveness of the run's ranks; `finished` when all ranks have said goodbye. `failed` or `lost` while the
    run is broken and no rank is there."""
    breakdown: Breakdown | None = None
    """How the run broke down; None if it did not, or goes on again."""
    device_kind: DeviceKind
    world_size: Count
    step: Count
    generation: Count
    started_at: float
    last_seen: float
    paths: tuple[str, ...] = ()
    """Names of the storage paths of the run's ranks."""
    totals: RunTotals | None = None
    """Totals over all present ranks (live or stale); None while there is no step that all of them have reported."""
    ranks: tuple[RankView, ...]

    @property
    def is_running(self) -> bool:
        """Whether any rank is live or stale; other ranks may be lost."""
        return any(rank.liveness in ("live", "stale") for rank in self.ranks)


class StepsView(Message):
    """The newest steps of one rank, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[StepReport, ...]


class TimelinesView(Message):
    """The steps of one rank for which the daemon has a timeline, oldest first."""

    run: RunName
    rank: Rank
    steps: tuple[int, ...]
