"""The control plane: handles requests of agents and operators. It decides, stores the decision, and then notifies.

It runs on one event loop. Every method that decides is called in a turn (`turns.py`, a mutex), one at a time, so the
methods are atomic. A decision is stored before it becomes visible: if the store raises an exception, the state in
memory is unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import ExitStack
from typing import Final

from sqlalchemy.exc import OperationalError

from tidegate.daemon.control import serializers
from tidegate.daemon.control.audit_rows import taken_over_notes
from tidegate.daemon.control.event_applier import EventApplier
from tidegate.daemon.control.event_ids import EventIds
from tidegate.daemon.control.rank_states import RankStates
from tidegate.daemon.control.registry import RunRegistry
from tidegate.daemon.control.restore import restore
from tidegate.daemon.control.retention import GONE_RANKS_KEPT, LAST_STEPS_KEPT, Retention
from tidegate.daemon.control.run import Clocks, Member, Run
from tidegate.daemon.control.step_writer import StepWriter
from tidegate.daemon.control.trials import Predicted, Trials
from tidegate.daemon.control.turns import Turns
from tidegate.daemon.decisions.generations import (
    ControlState,
    Generation,
    NewProposal,
    RankApplied,
    RankJoined,
    Tick,
    VoteCast,
)
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.engines import is_busy
from tidegate.daemon.storage.records import AgentRecord, AuditNote
from tidegate.daemon.storage.step_table import step_of
from tidegate.daemon.storage.store import Store
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentHello, AgentReport, Lease, Vote
from tidegate.wire.base import KnobChanges
from tidegate.wire.canary import CanaryRequest

FLUSH_SECONDS: Final = 30.0
"""Seconds between two writes of the ranks' changing data (liveness, time of the last message, step, last report) to the
database."""
RESET: Final = "reset_knobs at start-up"
RETRY_SECONDS: Final = 2.0
"""Time until the next try, if the deadlines and leases of a run could not be handled because of an error."""
log = logging.getLogger(__name__)


class ControlPlane:
    """Handles the requests of agents and operators: registers ranks, takes their reports and votes, and proposes new
    knobs. Stores each decision, and applies deadlines and leases. Durations are in seconds."""

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float = 10.0,
        proposal_seconds: float = 5.0,
        keep_seconds: float = 7 * 86_400.0,
        keep_runs_seconds: float = 30 * 86_400.0,
        clock: Clocks | None = None,
    ) -> None:
        self.store = store
        self.turns = Turns(store)
        self._lease_seconds = lease_seconds
        self.closing = False
        self._proposal_seconds = proposal_seconds
        self._clock = clock or Clocks()
        self._flushed = self._clock.mono()
        self._not_before: dict[str, float] = {}
        """Time of the next try for runs whose deadlines and leases could not be handled, on the monotonic clock."""
        known = restore(store, lease_seconds, self._clock, GONE_RANKS_KEPT, LAST_STEPS_KEPT)
        damaged = store.run_names() - known[0].keys()
        self._event_ids = EventIds(store)
        self.registry = RunRegistry(*known, lease_seconds, self._clock, self._event_ids, damaged)
        self.step_writer = StepWriter(store.steps, keep_seconds, self._clock)
        self._events = EventApplier(store, self.registry, self._clock)
        self._trials = Trials(store, self._events.apply, self._clock, proposal_seconds)
        self.retention = Retention(store, self.registry, self.step_writer, self._trials, self._clock, keep_runs_seconds)
        self._ranks = RankStates(store, self.registry, self.retention, self._events, self._clock)

    # ---- agents

    def hello(self, hello: AgentHello, knobs: Knobs, owner: str = "") -> Lease:
        """Registers a rank. `knobs` are all its start-up settings; `owner` is the id of its token."""
        run, now = self.registry.runs.get(hello.run), self._clock.wall()
        held = run.members.get(hello.rank) if run else None
        self.registry.check_free(hello)
        self.retention.admit(hello, owner)
        same = held is not None and held.hello.agent == hello.agent
        member = held if held and same else Member(hello=hello, seen_mono=0.0, last_seen=now, since=now)
        seated = AgentRecord(
            hello=hello, liveness="live", last_seen=now, step=member.step,
            applied_generation=member.applied_generation, last_report=member.last_report, owner=owner,
        )  # fmt: skip
        taken_over = taken_over_notes(hello, held.hello if held else None, now)
        if run is None:
            run = self._new_run(hello, knobs, seated, now)
        elif hello.reset_knobs and not same and knobs != serializers.knobs_of(run.control.committed):
            self._reset(run, hello, knobs, seated, taken_over)
        else:
            self.store.save(run.name, notes=taken_over, agents=[seated])
        member.hello, member.ended, member.owner = hello, None, owner
        self._ranks.mark_seen(member)
        if held is not None:
            self.registry.agents.pop(held.hello.agent, None)
            if not same:
                self.step_writer.drop(held.hello.agent)
                run.directive_notifier.notify(held.hello.agent)
        run.seat(member)
        self.registry.agents[hello.agent] = (run.name, hello.rank)
        self._events.apply(run, RankJoined(hello.rank, fresh=not same))
        self.registry.publish_liveness(run, member)
        self._ranks.finish_surplus_ranks(run)
        return self._lease(run, member)

    def report(self, agent: str, report: AgentReport) -> Lease:
        """Takes a rank's report and renews its lease."""
        run, member = self.registry.member(agent)
        if member.is_past(report):
            detail = f"The report of step {report.step} is older than what rank {member.hello.rank} has reported since."
            raise ProblemError(409, "past-report", detail)
        self._ranks.mark_live(run, member)
        steps = member.add_report(report)
        self.step_writer.add(member, steps)
        if steps and run.is_restarted(member):
            self._ranks.mend(run)
        rank = member.hello.rank
        if report.applied is not None:
            self._applied(run, member, report.applied.generation, report.applied.step)
        # A second report with the same generation: the agent will not report the first step with it separately.
        if report.generation == member.reported_generation:
            self._applied(run, member, report.generation, report.step)
        self._events.measure_effect(run, rank)
        self._trials.evaluate(run)
        member.reported_generation = report.generation  # last: a report that the database stops is given here again
        data = {"rank": rank, "step": report.step, "phase": report.phase, "generation": report.generation}
        self.registry.publish(run, "report", data)
        if report.finished:
            self.goodbye(agent)
        return self._lease(run, member)

    def vote(self, agent: str, vote: Vote) -> None:
        """Takes a rank's vote on a proposed generation: whether the rank can run with its knobs."""
        run, member = self.registry.member(agent)
        self._ranks.mark_live(run, member)
        self._events.apply(run, VoteCast(member.hello.rank, vote.generation, vote.can, vote.reason, self._clock.wall()))

    def goodbye(self, agent: str, error: str = "") -> None:
        """Signs an agent off: its rank has finished, or failed by an exception of the type `error`. Idempotent."""
        name, rank = self.registry.agents.get(agent, ("", -1))
        if not name:
            self.registry.member(agent)  # raises
        run = self.registry.runs[name]
        member = run.members[rank]
        if member.ended is None:
            self._ranks.finish(run, member, f"rank {rank}", f"The training ended with {error}." if error else "", error)

    # ---- operators

    def patch(
        self,
        run: Run,
        knobs: Knobs,
        changes: KnobChanges,
        author: str,
        reason: str,
        trial: tuple[CanaryRequest, Predicted] | None = None,
    ) -> Generation:
        """Proposes new knobs as the next generation. The caller has checked If-Match.

        knobs: all knobs after the change. changes: the changed knobs only. trial: the requested trial of the change and
        its predicted update times; None: no trial.
        """
        at, deadline = self._clock.wall(), self._clock.mono() + self._proposal_seconds
        self._events.apply(
            run,
            NewProposal(
                knobs=knobs.as_dict(paths=bool(run.paths)),
                changes=changes,
                author=author,
                reason=reason,
                at=at,
                deadline=deadline,
                canary=self._trials.begin(run, *trial) if trial else None,
            ),
        )
        return run.latest

    def roll_back(self, run: Run, to: int | None, author: str, reason: str) -> Generation:
        """Proposes the knobs of generation `to` as the next generation.

        `to` None: the generation before a running trial, else the newest one committed before the present generation.
        """
        return self._trials.roll_back(run, to, author, reason)

    async def load_last_steps(self, run: Run) -> None:
        """Loads from the store the last steps of lost and finished ranks of the run that are not in memory."""
        gone = (member for rank, member in run.members.items() if rank not in run.control.present)
        forgotten = {m.hello.agent: m for m in gone if not m.recent and m.window.newest >= 0}
        if not forgotten:
            return
        for agent, step in (await asyncio.to_thread(self.store.steps.last, list(forgotten))).items():
            if not forgotten[agent].recent and (report := step_of(agent, step)):
                forgotten[agent].set_recent([report])

    # ---- time

    def tick(self) -> None:
        """Handles the deadlines and leases of all runs. Call it several times a second.

        If an error occurs for one run, the other runs are still handled, and the next try for that run is after
        `RETRY_SECONDS`. It raises OperationalError at the end if another process holds the database's write lock.
        """
        now, at, busy = self._clock.mono(), self._clock.wall(), None
        flush = now - self._flushed >= FLUSH_SECONDS
        for run in list(self.registry.runs.values()):
            if self._not_before.get(run.name, now) > now:
                continue
            self._not_before.pop(run.name, None)
            try:
                self._tick(run, now, at, flush)
            except Exception as error:  # an error of one run must not stop deadlines and leases of the others
                if isinstance(error, OperationalError) and is_busy(error):
                    busy = error
                    continue
                log.exception(
                    "the check of deadlines and leases of run %s failed, next try in %g s", run.name, RETRY_SECONDS
                )
                self._not_before[run.name] = now + RETRY_SECONDS
        if busy is not None:
            raise busy
        if flush:
            self._flushed = now
            self.retention.forget_gone()
            self._event_ids.refill()
        self.step_writer.tick(now)
        self.retention.fit_steps(now)
        self.retention.tick(now)

    def _tick(self, run: Run, now: float, at: float, flush: bool) -> None:
        self._events.apply(run, Tick(now, at))
        self._trials.evaluate(run)
        self._trials.tick(run, now)
        changed = [member for member in run.members.values() if self._ranks.announce_liveness(run, member, at)]
        if changed:
            self._ranks.finish_surplus_ranks(run)
        present = [run.members[rank] for rank in run.control.present]
        if flush and present:
            self.store.update_agents([self._ranks.record(member) for member in present])

    def close(self) -> None:
        """Wakes all waiting requests, for the shutdown; later requests do not wait."""
        self.closing = True
        for run in self.registry.runs.values():
            run.event_notifier.notify_all()
            run.directive_notifier.notify_all()

    def save_all(self) -> None:
        """Stores, at the shutdown, the present data of all ranks and the buffered steps. If a part fails, the other
        parts are still stored, and the error is raised at the end."""
        with ExitStack() as stack:
            for run in self.registry.runs.values():
                stack.callback(
                    self.store.update_agents, [self._ranks.record(member) for member in run.members.values()]
                )
            stack.callback(self.step_writer.close)
            stack.callback(self.step_writer.write)

    # ---- inside

    def _lease(self, run: Run, member: Member) -> Lease:
        return Lease(
            lease_seconds=self._lease_seconds,
            directive=serializers.directive(run, member.hello.rank),
            report_seconds=self._trials.report_seconds(run),
        )

    def _new_run(self, hello: AgentHello, knobs: Knobs, seated: AgentRecord, now: float) -> Run:
        first = Generation(
            number=0,
            state="committed",
            knobs=knobs.as_dict(paths=bool(hello.paths)),
            changes={},
            author=f"rank {hello.rank}@{hello.host}"[:64],
            reason="start-up settings",
            created_at=now,
            decided_at=now,
        )
        self.store.add_run(hello.run, now, first, seated)
        control = ControlState(newest=0, committed=first)
        self.registry.runs[hello.run] = run = Run(name=hello.run, created_at=now, control=control, latest=first)
        return run

    def _reset(
        self, run: Run, hello: AgentHello, knobs: Knobs, seated: AgentRecord, taken_over: list[AuditNote]
    ) -> None:
        """Replaces the run's knobs by the rank's start-up settings `knobs`, because its agent registered with
        `reset_knobs`.

        The knobs, the rank (`seated`) and the audit rows are stored in one transaction. If it fails, nothing has
        changed, and the agent can register again.
        """
        now, others = self._clock.wall(), run.control.present - {hello.rank}
        paths = bool(hello.paths) or any(run.members[rank].hello.paths for rank in others)
        before, after = serializers.knobs_of(run.control.committed).as_dict(paths=paths), knobs.as_dict(paths=paths)
        author = f"rank {hello.rank}@{hello.host}"[:64]
        reset = AuditNote(
            timestamp=now, actor=author, action="reset", run=run.name, generation=run.control.newest + 1,
            before=before, after=after, reason=RESET,
        )  # fmt: skip
        self._events.apply(
            run,
            NewProposal(
                knobs=after,
                changes={name: value for name, value in after.items() if before.get(name) != value},
                author=author,
                reason=RESET,
                at=now,
                deadline=math.inf,
                commit=True,
            ),
            [seated],
            [*taken_over, reset],
        )

    def _applied(self, run: Run, member: Member, generation: int, step: int) -> None:
        member.applied.setdefault(generation, step)
        member.applied_generation = max(member.applied_generation, generation)
        self._events.apply(run, RankApplied(member.hello.rank, generation, step))
