"""Serializers: convert the daemon's state of a run to the messages of the API."""

from __future__ import annotations

import functools

from tidegate.daemon.control.audit_rows import MAX_TEXT
from tidegate.daemon.control.liveness import of_run
from tidegate.daemon.control.run import Member, Run
from tidegate.daemon.control.step_totals import totals
from tidegate.daemon.decisions.canary import Canary
from tidegate.daemon.decisions.generations import Generation
from tidegate.knobs.knobs import Knobs, KnobValue, specs_for
from tidegate.wire.agent import Directive
from tidegate.wire.base import KnobChanges, Liveness
from tidegate.wire.canary import CanaryView
from tidegate.wire.knobs import GenerationView, KnobBound, KnobsView, RankKnobs
from tidegate.wire.run import RankView, RunView
from tidegate.wire.standards import SdTarget


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
        outcome=g.outcome[:MAX_TEXT],
        applied=dict(g.applied),
        measured_effect=g.effect,
        canary=canary_view(g.canary) if g.canary else None,
        restores=g.restores,
    )


def canary_view(canary: Canary) -> CanaryView:
    return CanaryView(
        base=canary.base,
        steps=canary.steps,
        min_effect=canary.min_effect,
        min_headroom=canary.min_headroom,
        state=canary.state,
        verdict=canary.verdict[:MAX_TEXT],
        predicted_update_seconds_before=canary.predicted_before,
        predicted_update_seconds_after=canary.predicted_after,
        measured=canary.measured,
    )


def run_view(run: Run, states: dict[int, Liveness]) -> RunView:
    members = [run.members[rank] for rank in sorted(run.members)]
    lead = run.lead
    return RunView(
        run=run.name,
        liveness=of_run(states.values(), run.breakdown),
        breakdown=run.breakdown,
        device_kind=lead[1].hello.device_kind if lead else "emulated",
        world_size=run.world_size,
        step=max((m.step for m in members), default=0),
        generation=run.control.committed.number,
        started_at=run.created_at,
        last_seen=run.last_seen,
        paths=run.paths,
        totals=totals(run),
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
        last_step=member.recent[-1] if member.recent else None,
        predicted_update_seconds=member.predicted_update_seconds,
        device_memory_bytes=hello.device_memory_bytes,
    )


def knobs_view(run: Run, states: dict[int, Liveness]) -> KnobsView:
    votes = run.latest.votes
    return KnobsView(
        run=run.name,
        generation=run.control.newest,
        desired=_desired(run),
        bounds={name: KnobBound.of(spec) for name, spec in specs_for(run.paths).items()},
        retired=retired_paths(run),
        ranks=tuple(
            RankKnobs(
                rank=rank,
                liveness=states[rank],
                applied_generation=run.members[rank].applied_generation,
                effective=run.members[rank].effective,
                state_bytes=run.members[rank].state_bytes,
                refused=votes[rank].reason if rank in votes and not votes[rank].can else None,
            )
            for rank in sorted(run.members)
        ),
        pending=generation_view(run.name, run.control.pending) if run.control.pending else None,
    )


def retired_paths(run: Run) -> dict[str, str]:
    """The paths that have failed on a present rank, each with the lowest such rank and its reason."""
    found: dict[str, str] = {}
    for rank in sorted(run.control.present):
        if evidence := run.members[rank].evidence:
            for path in evidence.retired:
                why = evidence.retired_reasons.get(path, "it failed.")
                found.setdefault(path, f"on rank {rank}: {why}"[:MAX_TEXT])
    return found


def _desired(run: Run) -> KnobChanges:
    """The committed knobs; with the knobs of storage if the run has storage paths."""
    knobs = knobs_of(run.control.committed)
    return knobs.as_dict(paths=True) if run.paths else knobs.fitted(()).as_dict(paths=False)


def knobs_of(generation: Generation) -> Knobs:
    """All knobs of a generation; a knob that did not exist when the generation was stored has its default."""
    return Knobs(**generation.knobs)  # type: ignore[arg-type]


def directive(run: Run, rank: int) -> Directive:
    """The directive for a rank: the committed knobs, and a proposal that the rank has not voted on yet.

    Stored knobs may name storage paths that no longer exist; these knobs become `auto` in the directive. The committed
    knobs are checked against the rank's own paths, the proposed knobs against the run's paths.
    """
    pending, paths = run.control.pending, run.members[rank].hello.paths
    proposed = pending if pending is not None and rank not in pending.votes else None
    return Directive(
        committed=run.control.committed.number,
        committed_knobs=_fitted(tuple(run.control.committed.knobs.items()), paths),
        proposed=proposed.number if proposed else None,
        proposed_knobs=_fitted(tuple(proposed.knobs.items()), run.paths) if proposed else None,
    )


@functools.lru_cache(maxsize=1024)  # most ranks of a run get the same knobs
def _fitted(knobs: tuple[tuple[str, KnobValue], ...], paths: tuple[str, ...]) -> KnobChanges:
    """The knobs for a run with these storage paths: a `tier_split` that names another path becomes `auto`.

    Without paths, all knobs of storage become `auto`.
    """
    return Knobs(**dict(knobs)).fitted(paths).as_dict(paths=bool(paths))  # type: ignore[arg-type]


def sd_target(member: Member) -> SdTarget:
    """The Prometheus target of a rank, for service discovery."""
    hello = member.hello
    labels = {"run": hello.run, "rank": str(hello.rank), "host": hello.host, "device_kind": hello.device_kind}
    return SdTarget(targets=(hello.metrics_address,), labels=labels)
