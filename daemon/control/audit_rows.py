"""Builds rows of the audit log: actor, action, knobs before and after, reason and effect."""

from __future__ import annotations

from typing import Final

from tidegate.daemon.decisions.generations import ControlState, Decision, Generation
from tidegate.daemon.storage.records import AuditNote
from tidegate.wire.agent import AgentHello
from tidegate.wire.base import KnobChanges

AUDITED: Final = frozenset(
    {"proposed", "committed", "refused", "aborted", "superseded", "applied", "promoted", "condemned", "canary_ended"}
)
MAX_TEXT: Final = 2_000
"""Maximum number of characters of a reason or an effect; longer texts are cut."""


def decision_note(run: str, before: ControlState, decision: Decision, at: float) -> AuditNote:
    """The audit row of one decision about a generation, for example that it was proposed, committed or refused.
    `before`: state with the knobs that were in force before. `at`: seconds since the epoch."""
    made = decision.generation
    effect = made.outcome
    if decision.kind == "applied":
        effect = "first step with it: " + ", ".join(f"rank {r} step {s}" for r, s in sorted(made.applied.items())[:32])
    if decision.kind in ("promoted", "condemned", "canary_ended") and made.canary is not None:
        effect = f"{made.canary.state.replace('_', ' ')}: {made.canary.verdict}"
    actor = made.author if decision.kind == "proposed" else "daemon"
    return note(run, at, actor, decision.kind, made, before=before.committed.knobs, effect=effect)


def taken_over_notes(hello: AgentHello, held: AgentHello | None, at: float) -> list[AuditNote]:
    """The audit row of a takeover, as a list with one row; empty if there is no takeover.

    In a takeover, a new agent registers for a rank in place of an agent whose process has ended without a goodbye.
    hello: the message with which the new agent registers. held: the same message of the agent that holds the rank;
    None if no agent holds it.
    """
    if held is None or held.agent != hello.replaces or hello.process == held.process is not None:
        return []
    ended = f"Process {held.pid} on {held.host} has ended without a goodbye."
    text = f"{ended} Process {hello.pid} has taken over rank {hello.rank}."
    return [note(hello.run, at, f"rank {hello.rank}", "taken over", reason=text)]


def note(
    run: str,
    at: float,
    actor: str,
    action: str,
    made: Generation | None = None,
    *,
    before: KnobChanges | None = None,
    reason: str = "",
    effect: str = "",
) -> AuditNote:
    """Creates one row of the audit log. `at`: seconds since the epoch. `made`: the generation that the row is about.
    `before`: the knobs before the action."""
    return AuditNote(
        timestamp=at,
        actor=actor,
        action=action,
        run=run,
        generation=made.number if made else None,
        before=before,
        after=made.knobs if made else None,
        reason=(reason or (made.reason if made else ""))[:MAX_TEXT],
        effect=effect[:MAX_TEXT],
    )
