"""The timeline of one step: spans of ops on lanes. The executor gives measured timelines, the simulator simulated
ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tidegate.plan.ops import Content, OpKind

Phase = Literal["forward", "backward", "update", "checkpoint", "other"]
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "update", "checkpoint", "other")
Source = Literal["measured", "simulated"]


class Span(NamedTuple):
    """One run of one op on its lane, in seconds since the timeline's origin. An op that was repeated has two spans.

    A tuple, because a step makes one for each op, and a frozen dataclass takes six times as long to make.
    """

    op: int
    kind: OpKind
    lane: str
    subgroup: int
    start: float
    end: float
    nbytes: int
    numel: int
    content: Content | None = None
    slot: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A stretch of wall time of one phase, in seconds since the timeline's origin."""

    phase: Phase
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step. `deps[op]` are the ids of the ops that `op` waits for, in addition to its lane's order.

    `origin` is the wall-clock time (seconds since the epoch) of second 0; 0.0 for a simulated timeline.
    """

    step: int
    source: Source
    spans: tuple[Span, ...]
    phases: tuple[PhaseSpan, ...]
    deps: dict[int, tuple[int, ...]]
    origin: float = 0.0

    def window(self, phase: Phase) -> tuple[float, float] | None:
        """First start and last end of a phase; None when the step does not have this phase."""
        spans = [p for p in self.phases if p.phase == phase]
        return (min(p.start for p in spans), max(p.end for p in spans)) if spans else None


@dataclass(frozen=True, slots=True)
class Stall:
    """Wall time of a phase in which the step could not proceed; `cause` is one of STALL_CAUSES or a path's lane."""

    phase: Phase
    cause: str
    start: float
    end: float


DISPATCH: Final = "dispatch"
"""Cause of stalls in which the next op did not wait for a running op: it waited for its gradient, for the call of
`step()`, or for the agent to start it."""
STALL_CAUSES: Final = ("h2d", "d2h", "cpu", "device", "lock", "collective", DISPATCH)
"""Stall causes that every training can have; each storage path adds its two lanes."""
