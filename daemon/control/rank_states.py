"""Changes the liveness of ranks (live, stale, lost, failed, finished). Publishes each change as an event, and stores
ranks that are lost, have failed or have finished."""

from __future__ import annotations

from dataclasses import replace

from tidegate.daemon.control.audit_rows import note
from tidegate.daemon.control.event_applier import EventApplier
from tidegate.daemon.control.registry import RunRegistry
from tidegate.daemon.control.retention import Retention
from tidegate.daemon.control.run import Clocks, Member, Run
from tidegate.daemon.decisions.generations import RankJoined, RankLeft
from tidegate.daemon.storage.records import AgentRecord
from tidegate.daemon.storage.store import Store
from tidegate.wire.base import Liveness


class RankStates:
    """Changes the liveness of ranks."""

    def __init__(
        self, store: Store, registry: RunRegistry, retention: Retention, events: EventApplier, clock: Clocks
    ) -> None:
        self._store = store
        self._registry = registry
        self._retention = retention
        self._events = events
        self._clock = clock

    def record(self, member: Member) -> AgentRecord:
        """Converts a rank to the record that is stored in the database."""
        return AgentRecord(
            hello=member.hello,
            liveness=self._registry.liveness(member),
            last_seen=member.last_seen,
            step=member.step,
            applied_generation=member.applied_generation,
            last_report=member.last_report,
            owner=member.owner,
        )

    def mark_live(self, run: Run, member: Member) -> None:
        """Marks a rank as live because it has sent a message. A rank that was lost takes part in votes again."""
        was = self._registry.liveness(member)
        if not run.is_running:
            self._retention.check_quota(run, member.owner)
        self.mark_seen(member)
        if run.breakdown is not None and not run.breakdown.error and not run.is_restarted(member):
            self.mend(run)  # the network was cut: the process that was lost is there
        if member.hello.rank not in run.control.present:
            self._events.apply(run, RankJoined(member.hello.rank, fresh=False))
        if was != "live":
            self._registry.publish_liveness(run, member)

    def mark_seen(self, member: Member) -> None:
        """Records that the rank has sent a message now, so that it is live."""
        member.seen_mono, member.last_seen, member.announced = self._clock.mono(), self._clock.wall(), "live"

    def mend(self, run: Run) -> None:
        """Forgets the breakdown of a run that goes on again."""
        self._store.save(run.name, runs=[run.stored(None)])
        run.breakdown = None

    def finish(self, run: Run, member: Member, actor: str, reason: str, error: str = "") -> None:
        """Marks a rank as finished, because it said goodbye or will not return; as failed if `error` names the type of
        the exception by which it ended."""
        state: Liveness = "failed" if error else "finished"
        rank, at = member.hello.rank, self._clock.wall()
        record, breakdown = replace(self.record(member), liveness=state), run.breakdown_after(member, state, at, error)
        row = note(run.name, at, actor, "failed" if error else "goodbye", reason=reason)
        self._store.save(run.name, agents=[record], notes=[row], runs=[run.stored(breakdown)])
        member.ended = member.announced = state
        run.breakdown = breakdown
        self._events.apply(run, RankLeft(rank, at))
        run.directive_notifier.notify(member.hello.agent)
        self._registry.publish_liveness(run, member)

    def finish_surplus_ranks(self, run: Run) -> None:
        """Marks lost ranks as finished if the run was restarted with fewer ranks: they will not return."""
        size = run.world_size
        for rank, member in run.members.items():
            if rank >= size and self._registry.liveness(member) == "lost":
                self.finish(run, member, "daemon", f"Rank {rank} is lost and the run goes on with {size} ranks.")

    def announce_liveness(self, run: Run, member: Member, at: float) -> bool:
        """Publishes the liveness of a rank as an event if it has changed, and stores it if the rank is lost. Returns
        whether it has changed. `at`: present time in seconds since the epoch."""
        state = self._registry.liveness(member)
        if state == member.announced:
            return False
        if state == "lost":
            rank, silent = member.hello.rank, self._registry.lost_seconds
            lost = note(run.name, at, "daemon", "lost", reason=f"Rank {rank} sent no message for {silent:g} s.")
            breakdown = run.breakdown_after(member, state, at)
            self._store.save(run.name, agents=[self.record(member)], notes=[lost], runs=[run.stored(breakdown)])
            run.breakdown = breakdown
            self._events.apply(run, RankLeft(rank, at))
        member.announced = state
        self._registry.publish_liveness(run, member)
        return True
