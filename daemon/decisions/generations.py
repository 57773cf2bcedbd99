"""The life of knob generations as a pure state machine: events in, decisions out. No clock, no storage, no network.

proposed ──all present ranks say yes──► committed ──all present ranks applied──► applied
   │  ├─ one says no ──► refused
   │  ├─ silence past the deadline ──► aborted
   │  └─ a newer proposal ──► superseded
A generation may be on trial (its canary): waiting ──► promoted, or ──► condemned ──the next one commits──► rolled_back.
Present ranks are those whose lease has not been lost; without any, a proposal is committed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tidegate.daemon.decisions.canary import Canary
from tidegate.wire.base import KnobChanges
from tidegate.wire.knobs import GenerationState, MeasuredEffect

What = Literal[
    "proposed", "voted", "committed", "refused", "aborted", "superseded", "rank_applied", "applied",
    "promoted", "condemned", "canary_ended",
]  # fmt: skip
NO_RANKS: Final = "No rank is running: takes effect when the run starts again."


@dataclass(frozen=True, slots=True)
class Ballot:
    can: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One version of a run's desired knobs. Times are seconds since the epoch."""

    number: int
    state: GenerationState
    knobs: KnobChanges
    changes: KnobChanges
    author: str
    reason: str = ""
    created_at: float
    decided_at: float | None = None
    outcome: str = ""
    votes: Mapping[int, Ballot] = field(default_factory=dict)
    applied: Mapping[int, int] = field(default_factory=dict)
    """First step that ran with it, by rank."""
    effect: MeasuredEffect | None = None
    canary: Canary | None = None
    restores: int | None = None
    """The generation whose knobs it brings back."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """What a run's control knows: at most one pending generation on top of one committed."""

    newest: int
    committed: Generation
    pending: Generation | None = None
    deadline: float = math.inf
    present: frozenset[int] = frozenset()

    def is_decided(self, generation: int) -> bool:
        return self.pending is None or self.pending.number != generation


@dataclass(frozen=True, kw_only=True)
class Propose:
    """`commit` skips the vote: the start-up settings of a run that was told to reset its knobs."""

    knobs: KnobChanges
    changes: KnobChanges
    author: str
    reason: str
    at: float
    deadline: float
    commit: bool = False
    canary: Canary | None = None
    restores: int | None = None


@dataclass(frozen=True, slots=True)
class Cast:
    rank: int
    generation: int
    can: bool
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Apply:
    rank: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Join:
    """A rank is present; `fresh` when a new agent holds it, whose predecessor's vote is void."""

    rank: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Leave:
    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """`now` is on the deadline's clock, `at` since the epoch."""

    now: float
    at: float


@dataclass(frozen=True, slots=True)
class Judge:
    """The trial of the committed generation has its verdict."""

    generation: int
    canary: Canary


Happening = Propose | Cast | Apply | Join | Leave | Tick | Judge


@dataclass(frozen=True, slots=True)
class Decision:
    what: What
    generation: Generation


Outcome = tuple[Control, tuple[Decision, ...]]


def decide(control: Control, event: Happening) -> Outcome:
    """The control after `event`, and what was decided, in order."""
    match event:
        case Propose():
            return _propose(control, event)
        case Cast():
            return _cast(control, event)
        case Apply():
            return _apply(control, event)
        case Join(rank, fresh):
            pending = control.pending
            if fresh and pending is not None:
                pending = replace(pending, votes={r: b for r, b in pending.votes.items() if r != rank})
            return replace(control, present=control.present | {rank}, pending=pending), ()
        case Leave(rank, at):
            gone = replace(control, present=control.present - {rank})
            settled, decisions = _settle(gone, at)
            done, more = _check_applied(settled, control.committed) if not decisions else (settled, ())
            return done, decisions + more
        case Tick(now, at):
            if control.pending is None or now < control.deadline:
                return control, ()
            silent = sorted(control.present - control.pending.votes.keys())
            named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
            outcome = f"No answer from {named} before the deadline: nothing was changed."
            return _close(control, control.pending, "aborted", outcome, at)
        case Judge(generation, canary):
            known = control.committed
            if known.number != generation or known.canary is None or known.canary.state != "waiting":
                return control, ()
            judged = replace(known, canary=canary)
            what: What = "promoted" if canary.state == "promoted" else "condemned"
            return replace(control, committed=judged), (Decision(what, judged),)


def _propose(control: Control, event: Propose) -> Outcome:
    number = control.newest + 1
    made = Generation(
        number=number,
        state="proposed",
        knobs=dict(event.knobs),
        changes=dict(event.changes),
        author=event.author,
        reason=event.reason,
        created_at=event.at,
        canary=event.canary,
        restores=event.restores,
    )
    decisions: tuple[Decision, ...] = ()
    if control.pending is not None:
        why = f"Superseded by generation {number} of {event.author} before all ranks had answered."
        control, decisions = _close(control, control.pending, "superseded", why, event.at)
    control = replace(control, newest=number, pending=made, deadline=event.deadline)
    decisions += (Decision("proposed", made),)
    if event.commit:
        control, more = _commit(control, made, "Start-up settings won: the knobs were reset.", event.at)
    else:
        control, more = _settle(control, event.at)
    return control, decisions + more


def _cast(control: Control, event: Cast) -> Outcome:
    pending, committed = control.pending, control.committed
    if event.generation == committed.number and not event.can and event.rank not in committed.applied:
        # It was said to work, and does not: nothing is decided any more, but people see why it is not applied.
        committed = replace(committed, votes={**committed.votes, event.rank: Ballot(False, event.reason)})
        return replace(control, committed=committed), (Decision("voted", committed),)
    if pending is None or event.generation != pending.number or event.rank not in control.present:
        return control, ()  # too late: it was decided without this vote
    pending = replace(pending, votes={**pending.votes, event.rank: Ballot(event.can, event.reason)})
    settled, decisions = _settle(replace(control, pending=pending), event.at)
    return settled, (Decision("voted", pending), *decisions)


def _apply(control: Control, event: Apply) -> Outcome:
    committed = control.committed
    if event.generation != committed.number or event.rank in committed.applied:
        return control, ()
    committed = replace(committed, applied={**committed.applied, event.rank: event.step})
    applied, decisions = _check_applied(replace(control, committed=committed), committed)
    return applied, (Decision("rank_applied", committed), *decisions)


def _settle(control: Control, at: float) -> Outcome:
    """Decides the pending generation if the votes suffice."""
    if (pending := control.pending) is None:
        return control, ()
    no = [rank for rank, ballot in pending.votes.items() if not ballot.can and rank in control.present]
    if no:
        rank = min(no)
        reason = pending.votes[rank].reason or "it gave no reason"
        return _close(control, pending, "refused", f"Rank {rank} refused: {reason}", at)
    if not control.present:
        return _commit(control, pending, NO_RANKS, at)
    if len(pending.votes) >= len(control.present) and control.present <= pending.votes.keys():
        ranks = len(control.present)
        outcome = "The rank said yes." if ranks == 1 else f"All {ranks} ranks said yes."
        return _commit(control, pending, outcome, at)
    return control, ()


def _commit(control: Control, pending: Generation, outcome: str, at: float) -> Outcome:
    made = replace(pending, state="committed", decided_at=at, outcome=outcome)
    decisions: tuple[Decision, ...] = (Decision("committed", made),)
    old = control.committed
    if old.canary is not None and old.canary.open:
        back = pending.restores is not None and pending.restores <= old.canary.base
        end = old.canary.closed("rolled_back" if back else "superseded", f"Ended by generation {made.number}.")
        decisions = (Decision("canary_ended", replace(old, canary=end)), *decisions)
    return replace(control, committed=made, pending=None, deadline=math.inf), decisions


def _close(
    control: Control, pending: Generation, state: Literal["refused", "aborted", "superseded"], outcome: str, at: float
) -> Outcome:
    canary = pending.canary.closed("superseded", "It never ran.") if pending.canary else None
    closed = replace(pending, state=state, decided_at=at, outcome=outcome, canary=canary)
    return replace(control, pending=None, deadline=math.inf), (Decision(state, closed),)


def _check_applied(control: Control, committed: Generation) -> Outcome:
    if committed.state != "committed" or not 0 < len(control.present) <= len(committed.applied):
        return control, ()
    if not control.present <= committed.applied.keys():
        return control, ()
    done = replace(committed, state="applied")
    return replace(control, committed=done), (Decision("applied", done),)
