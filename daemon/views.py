"""What operators see of a run, made from what the daemon knows."""

from __future__ import annotations

from tidegate.daemon.control.generations import Generation
from tidegate.daemon.control.liveness import of_run
from tidegate.daemon.control.notes import TEXT
from tidegate.daemon.control.run import Member, Run
from tidegate.knobs import SPECS
from tidegate.wire import (
    Directive,
    GenerationView,
    KnobBound,
    KnobsView,
    Liveness,
    RankKnobs,
    RankView,
    RunView,
    SdTarget,
)


def generation_view(run: str, g: Generation) -> GenerationView:
    return GenerationView(
        run=run,
        generation=g.number,
        state=g.state,
        knobs=g.knobs,
        changes=g.changes,
        author=g.author,
        reason=g.reason,
        created_at=g.created_at,
        decided_at=g.decided_at,
        outcome=g.outcome[:TEXT],
        applied=dict(g.applied),
        measured_effect=g.effect,
    )


def run_view(run: Run, states: dict[int, Liveness]) -> RunView:
    members = [run.members[rank] for rank in sorted(run.members)]
    lead = run.lead
    return RunView(
        run=run.name,
        liveness=of_run(states.values()),
        device_kind=lead[1].hello.device_kind if lead else "emulated",
        world_size=lead[1].hello.world_size if lead else 0,
        step=max((m.step for m in members), default=0),
        generation=run.control.committed.number,
        started_at=run.created_at,
        last_seen=max((m.last_seen for m in members), default=run.created_at),
        ranks=tuple(_rank_view(m, states[m.hello.rank]) for m in members),
    )


def _rank_view(member: Member, state: Liveness) -> RankView:
    hello = member.hello
    return RankView(
        rank=hello.rank,
        agent=hello.agent,
        host=hello.host,
        pid=hello.pid,
        device_kind=hello.device_kind,
        metrics_address=hello.metrics_address,
        liveness=state,
        last_seen=member.last_seen,
        started_at=hello.started_at,
        phase=member.phase,
        step=member.step,
        applied_generation=member.applied_generation,
        effective=member.effective,
        last_step=member.steps[-1] if member.steps else None,
        predicted_update_seconds=member.predicted_update_seconds,
    )


def knobs_view(run: Run, states: dict[int, Liveness]) -> KnobsView:
    votes = run.latest.votes
    return KnobsView(
        run=run.name,
        generation=run.control.newest,
        desired=run.control.committed.knobs,
        bounds={
            name: KnobBound(minimum=s.minimum, maximum=s.maximum, words=s.words, unit=s.unit, help=s.help)
            for name, s in SPECS.items()
        },
        ranks=tuple(
            RankKnobs(
                rank=rank,
                liveness=states[rank],
                applied_generation=run.members[rank].applied_generation,
                effective=run.members[rank].effective,
                refused=votes[rank].reason if rank in votes and not votes[rank].can else None,
            )
            for rank in sorted(run.members)
        ),
        pending=generation_view(run.name, run.control.pending) if run.control.pending else None,
    )


def directive(run: Run, rank: int) -> Directive:
    """What the daemon wants of a rank; a proposal that it has voted on is not asked again."""
    pending = run.control.pending
    asked = pending if pending is not None and rank not in pending.votes else None
    return Directive(
        committed=run.control.committed.number,
        committed_knobs=run.control.committed.knobs,
        proposed=asked.number if asked else None,
        proposed_knobs=asked.knobs if asked else None,
    )


def sd_target(member: Member) -> SdTarget:
    hello = member.hello
    labels = {"run": hello.run, "rank": str(hello.rank), "host": hello.host, "device_kind": hello.device_kind}
    return SdTarget(targets=(hello.metrics_address,), labels=labels)
