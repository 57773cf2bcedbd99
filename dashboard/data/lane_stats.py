"""Use of each lane in an update (busy time, bytes, parameters): figures for the table next to the Gantt chart."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.plan.ops import LANES, OpKind
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.wire.timeline import TimelineView

UPDATES = (OpKind.CPU_UPDATE, OpKind.DEVICE_UPDATE)


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """Use of one lane in the update. `busy_seconds`: time in the update during which an op of the lane runs. If ops of
    the lane are partly outside the update, only the same share of bytes and parameters counts as of their time."""

    lane: str
    num_ops: int
    busy_seconds: float
    busy_share: float
    nbytes: int
    numel: int

    @property
    def bytes_per_second(self) -> float | None:
        return self.nbytes / self.busy_seconds if self.nbytes and self.busy_seconds > 0 else None

    @property
    def params_per_second(self) -> float | None:
        return self.numel / self.busy_seconds if self.numel and self.busy_seconds > 0 else None


def lane_use(view: TimelineView, first: float, last: float) -> list[LaneUse]:
    """Ops, busy seconds, bytes and parameters of each lane between the times `first` and `last`, in seconds since the
    timeline's origin. Of an op that is partly inside, only the time inside counts as busy."""
    found = []
    known = [lane for lane in LANES if any(row.lane == lane for row in view.spans)]
    for lane in [*known, *sorted({row.lane for row in view.spans} - set(LANES))]:
        rows = [row for row in view.spans if row.lane == lane and row.end > first and row.start < last]
        inside = busy_seconds(rows, (first, last))
        whole = busy_seconds(rows)
        share_inside = inside / whole if whole > 0 else 0.0
        found.append(
            LaneUse(
                lane=lane,
                num_ops=len(rows),
                busy_seconds=inside,
                busy_share=inside / (last - first) if last > first else 0.0,
                nbytes=round(sum(row.nbytes for row in rows) * share_inside),
                numel=round(sum(row.numel for row in rows if row.kind in UPDATES) * share_inside),
            )
        )
    return found
