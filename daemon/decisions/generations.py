"""State machine of knob generations (proposal, vote, commit): takes events, returns decisions.

It is pure: no clock, no storage, no network.

proposed ──all present ranks accept──► committed ──all present ranks have applied it──► applied
   ├─ a rank refuses ──► refused
   ├─ a rank has not voted at the deadline ──► aborted
   └─ there is a newer proposal ──► superseded
A generation may be on trial (its canary): waiting ──► promoted, or waiting ──► condemned. If the next generation is
committed while the trial is waiting or condemned, the trial ends: rolled_back if that generation restores the knobs of
before the trial, else superseded. Present ranks are live or stale, not lost or finished. Without present ranks, a
proposal is committed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from tidegate.daemon.decisions.canary import Canary
from tidegate.wire.base import KnobChanges
from tidegate.wire.knobs import GenerationState, MeasuredEffect

DecisionKind = Literal[
    "proposed", "voted", "committed", "refused", "aborted", "superseded", "rank_applied", "applied",
    "promoted", "condemned", "canary_ended",
]  # fmt: skip
"""What has happened to a generation. `rank_applied`: one rank runs with it; `applied`: all present ranks do.
`promoted`, `condemned`: verdict of its trial. `canary_ended`: its trial has ended, because another generation was
committed."""
COMMITTED_STATES: Final = frozenset({"committed", "applied"})
"""States of a generation that was committed: `committed` first, then `applied` when all present ranks run with it."""
NO_RANKS: Final = "No rank is running: takes effect when the run starts again."


class Ballot(NamedTuple):
    """The vote of one rank. `can`: whether it can run with the proposed knobs. `reason`: why not, if it cannot. In the
    database a vote is a JSON array."""

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
    """The first step that ran with this generation, by rank."""
    effect: MeasuredEffect | None = None
    canary: Canary | None = None
    restores: int | None = None
    """Number of the generation whose knobs this generation restores; None where it is no rollback."""


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """State of a run's generations: one committed generation, and at most one pending proposal that is newer."""

    newest: int
    """Number of the run's newest generation, in whatever state that generation is."""
    committed: Generation
    pending: Generation | None = None
    deadline: float = math.inf
    """Time at which the pending proposal is aborted, on the monotonic clock."""
    present: frozenset[int] = frozenset()
    """Ranks that are live or stale."""

    def is_decided(self, generation: int) -> bool:
        return self.pending is None or self.pending.number != generation


@dataclass(frozen=True, kw_only=True)
class NewProposal:
    """Event: new knobs are proposed. `at`: seconds since the epoch; `deadline`: on the monotonic clock.

    knobs: all knobs. changes: the changed knobs only. commit: whether the generation is committed without a vote, as
    for the start-up settings of a rank that registers with `reset_knobs`. restores: for a rollback, the number of the
    generation whose knobs are proposed again.
    """

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
class VoteCast:
    """Event: a rank has voted on a generation. `at`: seconds since the epoch."""

    rank: int
    generation: int
    can: bool
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RankApplied:
    """Event: a rank has begun to run with a generation. `step`: the first step with it."""

    rank: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class RankJoined:
    """Event: a rank has become present. `fresh`: it has a new agent, so the vote of its former agent is discarded."""

    rank: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class RankLeft:
    """Event: a rank is lost or has finished. `at`: seconds since the epoch."""

    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. `now` is on the monotonic clock, as the deadline; `at` is seconds since the epoch."""

    now: float
    at: float


@dataclass(frozen=True, slots=True)
class TrialJudged:
    """Event: the trial of the committed generation has a verdict."""

    generation: int
    canary: Canary


ControlEvent = NewProposal | VoteCast | RankApplied | RankJoined | RankLeft | Tick | TrialJudged


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about a generation. `generation` is its state after the decision."""

    kind: DecisionKind
    generation: Generation


Outcome = tuple[ControlState, tuple[Decision, ...]]


def decide(control: ControlState, event: ControlEvent) -> Outcome:
    """The state after `event`, and the decisions that follow from the event, in order."""
    match event:
        case NewProposal():
            return _propose(control, event)
        case VoteCast():
            return _cast(control, event)
        case RankApplied():
            return _apply(control, event)
        case RankJoined(rank, fresh):
            pending = control.pending
            if fresh and pending is not None:
                pending = replace(pending, votes={r: b for r, b in pending.votes.items() if r != rank})
            return replace(control, present=control.present | {rank}, pending=pending), ()
        case RankLeft(rank, at):
            counted, decisions = _count_votes(replace(control, present=control.present - {rank}), at)
            after, more = _check_applied(counted, control.committed) if not decisions else (counted, ())
            return after, decisions + more
        case Tick(now, at):
            if control.pending is None or now < control.deadline:
                return control, ()
            silent = sorted(control.present - control.pending.votes.keys())
            named = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
            outcome = f"No answer from {named} before the deadline: nothing was changed."
            return _close(control, control.pending, "aborted", outcome, at)
        case TrialJudged(generation, canary):
            committed = control.committed
            if committed.number != generation or committed.canary is None or committed.canary.state != "waiting":
                return control, ()
            judged = replace(committed, canary=canary)
            kind: DecisionKind = "promoted" if canary.state == "promoted" else "condemned"
            return replace(control, committed=judged), (Decision(kind, judged),)


def _propose(control: ControlState, event: NewProposal) -> Outcome:
    number = control.newest + 1
    proposal = Generation(
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
    control = replace(control, newest=number, pending=proposal, deadline=event.deadline)
    decisions += (Decision("proposed", proposal),)
    if event.commit:
        control, more = _commit(
            control, proposal, "A rank registered with reset_knobs=True: its settings replace the knobs.", event.at
        )
    else:
        control, more = _count_votes(control, event.at)
    return control, decisions + more


def _cast(control: ControlState, event: VoteCast) -> Outcome:
    pending, committed = control.pending, control.committed
    if event.generation == committed.number and not event.can and event.rank not in committed.applied:
        # The rank could not apply the generation after all. The vote decides nothing any more; it is kept so that
        # operators see why the generation is not applied.
        committed = replace(committed, votes={**committed.votes, event.rank: Ballot(False, event.reason)})
        return replace(control, committed=committed), (Decision("voted", committed),)
    if pending is None or event.generation != pending.number or event.rank not in control.present:
        return control, ()  # too late: the generation was decided without this vote
    pending = replace(pending, votes={**pending.votes, event.rank: Ballot(event.can, event.reason)})
    counted, decisions = _count_votes(replace(control, pending=pending), event.at)
    return counted, (Decision("voted", pending), *decisions)


def _apply(control: ControlState, event: RankApplied) -> Outcome:
    committed = control.committed
    if event.generation != committed.number or event.rank in committed.applied:
        return control, ()
    committed = replace(committed, applied={**committed.applied, event.rank: event.step})
    applied, decisions = _check_applied(replace(control, committed=committed), committed)
    return applied, (Decision("rank_applied", committed), *decisions)


def _count_votes(control: ControlState, at: float) -> Outcome:
    """Commits the pending generation if all present ranks have accepted it or no rank is present; closes it as refused
    if a present rank has refused it. Changes nothing while votes are missing. `at`: seconds since the epoch."""
    if (pending := control.pending) is None:
        return control, ()
    refusing = [rank for rank, ballot in pending.votes.items() if not ballot.can and rank in control.present]
    if refusing:
        rank = min(refusing)
        reason = pending.votes[rank].reason or "it gave no reason"
        return _close(control, pending, "refused", f"Rank {rank} refused: {reason}", at)
    if not control.present:
        return _commit(control, pending, NO_RANKS, at)
    if len(pending.votes) >= len(control.present) and control.present <= pending.votes.keys():
        ranks = len(control.present)
        return _commit(control, pending, "The rank said yes." if ranks == 1 else f"All {ranks} ranks said yes.", at)
    return control, ()


def _commit(control: ControlState, pending: Generation, outcome: str, at: float) -> Outcome:
    """Commits the pending generation, and ends the trial of the generation that was committed before. `outcome`: the
    reason as a sentence, for operators; `at`: seconds since the epoch."""
    committed = replace(pending, state="committed", decided_at=at, outcome=outcome)
    decisions: tuple[Decision, ...] = (Decision("committed", committed),)
    old = control.committed
    if old.canary is not None and old.canary.open:
        is_rollback = pending.restores is not None and pending.restores <= old.canary.base
        state: Literal["rolled_back", "superseded"] = "rolled_back" if is_rollback else "superseded"
        end = old.canary.closed(state, f"Ended by generation {committed.number}.")
        decisions = (Decision("canary_ended", replace(old, canary=end)), *decisions)
    return replace(control, committed=committed, pending=None, deadline=math.inf), decisions


def _close(
    control: ControlState,
    pending: Generation,
    state: Literal["refused", "aborted", "superseded"],
    outcome: str,
    at: float,
) -> Outcome:
    """Ends the pending generation in `state`, without a commit. `outcome`: the reason as a sentence, for operators;
    `at`: seconds since the epoch."""
    canary = pending.canary.closed("superseded", "It never ran.") if pending.canary else None
    closed = replace(pending, state=state, decided_at=at, outcome=outcome, canary=canary)
    return replace(control, pending=None, deadline=math.inf), (Decision(state, closed),)


def _check_applied(control: ControlState, committed: Generation) -> Outcome:
    """Marks the committed generation as applied once all present ranks run with it."""
    if committed.state != "committed" or not 0 < len(control.present) <= len(committed.applied):
        return control, ()
    if not control.present <= committed.applied.keys():
        return control, ()
    done = replace(committed, state="applied")
    return replace(control, committed=done), (Decision("applied", done),)
