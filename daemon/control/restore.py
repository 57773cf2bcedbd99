"""Restores runs and ranks from the database when the daemon starts."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from tidegate.daemon.control.audit_rows import note
from tidegate.daemon.control.run import RECENT_STEPS, Clocks, Member, Run
from tidegate.daemon.decisions.generations import COMMITTED_STATES, ControlState, Generation
from tidegate.daemon.decisions.step_window import STEPS_KEPT
from tidegate.daemon.storage.records import AgentRecord, StoredRun
from tidegate.daemon.storage.row_reader import REMEDY
from tidegate.daemon.storage.step_table import step_of
from tidegate.daemon.storage.store import Store

log = logging.getLogger(__name__)


def restore(
    store: Store, lease_seconds: float, clock: Clocks, gone_kept: int, last_kept: int
) -> tuple[dict[str, Run], dict[str, tuple[str, int]]]:
    """The stored runs, and the run and rank of each agent. Pending proposals are aborted.

    Ranks that were live or stale may still be running: they start as stale until their first message, so that a change
    waits for their vote. Of lost and finished ranks, the last `gone_kept` get their newest steps back, and the last
    `last_kept` their last step.
    """
    found = (_run(store, stored, clock) for stored in store.runs())
    runs = {run.name: run for run in found if run is not None}
    agents: dict[str, tuple[str, int]] = {}
    newest = store.steps.newest_numbers()
    gone: list[Member] = []
    for record in store.agents():
        if record.hello.run not in runs:
            continue
        run, rank = runs[record.hello.run], record.hello.rank
        member = _member(record, lease_seconds, clock)
        run.seat(member)
        agents[record.hello.agent] = (run.name, rank)
        if member.announced == "stale":
            run.control = replace(run.control, present=run.control.present | {rank})
            _recall_steps(store, member, STEPS_KEPT)
        else:
            gone.append(member)
        member.window.newest = newest.get(record.hello.agent, -1)
    _recall_gone(store, gone, gone_kept, last_kept)
    for run in runs.values():
        if run.control.present:
            _recall_applied(run, store.generations(run.name))
    return runs, agents


def _recall_gone(store: Store, gone: list[Member], gone_kept: int, last_kept: int) -> None:
    gone.sort(key=lambda member: member.last_seen, reverse=True)
    for member in gone[:gone_kept]:
        member.window.newest = -1
        _recall_steps(store, member, RECENT_STEPS)
    others = {member.hello.agent: member for member in gone[gone_kept:last_kept]}
    for agent, step in store.steps.last(list(others)).items():
        if report := step_of(agent, step):
            others[agent].set_recent([report])


def _recall_steps(store: Store, member: Member, limit: int) -> None:
    agent = member.hello.agent
    for report in (step_of(agent, body) for _, body in store.steps.newest(agent, limit)):
        if report is not None:
            member.add(report)


def _recall_applied(run: Run, generations: list[Generation]) -> None:
    """Sets, for the agent that holds each rank, the first step that it ran with each generation.

    Generations decided before the agent started are left out: their steps are those of an earlier agent.
    """
    for generation in generations:
        for rank, step in generation.applied.items():
            member = run.members.get(rank)
            if member is not None and (generation.decided_at or 0.0) >= member.hello.started_at:
                member.applied[generation.number] = step


def _run(store: Store, stored: StoredRun, clock: Clocks) -> Run | None:
    """The stored run; None if none of its committed generations can be read."""
    name = stored.name
    generations = store.generations(name)
    committed = max((g for g in generations if g.state in COMMITTED_STATES), key=lambda g: g.number, default=None)
    if committed is None:
        log.error("run %s is not restored, because none of its committed generations can be read: %s", name, REMEDY)
        return None
    latest = generations[-1]
    control = ControlState(newest=max(latest.number, store.newest_number(name)), committed=committed)
    if latest.state == "proposed":
        why = "The daemon restarted before all ranks had answered: nothing was changed."
        canary = latest.canary.closed("superseded", "It never ran.") if latest.canary else None
        latest = replace(latest, state="aborted", decided_at=clock.wall(), outcome=why, canary=canary)
        row = note(name, clock.wall(), "daemon", "aborted", latest, before=committed.knobs, effect=why)
        store.save(name, [latest], [row])
    return Run(name=name, created_at=stored.created_at, control=control, latest=latest, breakdown=stored.breakdown)


def _member(record: AgentRecord, lease_seconds: float, clock: Clocks) -> Member:
    here = record.liveness in ("live", "stale")
    member = Member(
        hello=record.hello,
        seen_mono=clock.mono() - lease_seconds * 1.001 if here else -math.inf,
        last_seen=record.last_seen,
        since=record.last_seen,
        ended=record.liveness if record.liveness in ("finished", "failed") else None,
        announced="stale" if here else record.liveness,
        step=record.step,
        applied_generation=record.applied_generation,
        owner=record.owner,
    )
    member.restore_last_report(record.last_report)
    return member
