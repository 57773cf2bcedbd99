"""Which runs the daemon keeps: how long after their end, and how many of each token; and how one is deleted.

A run goes on while any of its ranks is live or stale. Runs that go on are never deleted: by a quota those of one token
leave room for those of others. Runs that ended make room for new ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from tidegate.daemon.control.audit_rows import note
from tidegate.daemon.control.kept_steps import fitted
from tidegate.daemon.control.registry import NAMED, Roster
from tidegate.daemon.control.run import Clock, Member, Run
from tidegate.daemon.control.step_writer import History
from tidegate.daemon.control.trials import Trials
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.store import Store
from tidegate.wire.agent import AgentHello

RUNS_KEPT: Final = 10_000
RANKS_KEPT: Final = 100_000
RUNS_OF_A_TOKEN: Final = 2_000
"""Runs of one token that go on at the same time."""
RANKS_OF_A_TOKEN: Final = 20_000
"""Ranks that came with one token, in runs that go on."""
GONE_RANKS_KEPT: Final = 64
"""Ranks that are gone and whose newest steps are still in memory."""
LAST_STEPS_KEPT: Final = 4_096
"""Ranks that are gone and whose last step is still in memory; of others it is read when somebody asks for their run."""
STEPS_BYTES_OF_A_TOKEN: Final = 384 << 20
"""Memory that steps of one token's ranks take. The last of 512 ranks with 64 paths each fit, as they were told."""
FIT_SECONDS: Final = 1.0
DELETED_AT_ONCE: Final = 20
"""Runs in one transaction: others wait for it."""
SWEEP_SECONDS: Final = 30.0
DELETED: Final = "deleted"
"""In the audit log."""


class Retention:
    """`keep_seconds`: runs are kept for so long after a rank spoke last. `deleted` is called with each run's name."""

    def __init__(
        self, store: Store, roster: Roster, history: History, trials: Trials, clock: Clock, keep_seconds: float
    ) -> None:
        self._store = store
        self._roster = roster
        self._history = history
        self._trials = trials
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._swept_at = -math.inf
        self._fitted_at = -math.inf
        self.deleted: Callable[[str], None] = lambda run: None

    def delete(self, run: Run, actor: str, reason: str = "") -> None:
        """Forgets the run. Ends the request while it goes on."""
        states = sorted(self._roster.states(run).items())
        going = [f"rank {rank} is {state}" for rank, state in states if state in ("live", "stale")]
        if going:
            detail = (
                f"Run {run.name!r} goes on ({', '.join(going[:NAMED])}): end its processes, wait until a rank that "
                f"died is lost ({self._roster.lost_seconds:g} s after its last word), then delete it."
            )
            raise ProblemError(409, "run-goes-on", detail)
        self._delete([run], actor, reason)

    def admit(self, hello: AgentHello, owner: str) -> None:
        """Makes room for the rank where it is a new one. Ends the request where there is none for its token."""
        run = self._roster.runs.get(hello.run)
        known = run is not None and hello.rank in run.members
        if run is None or not known or not run.goes_on:
            self.check_quota(run, owner)
        if not known:
            self._make_room(hello.run)

    def check_quota(self, run: Run | None, owner: str) -> None:
        """Ends the request where the token has as many runs and ranks that go on as it may have, and this is one more.

        run: None for a new one."""
        runs = self._roster.runs.values()
        starts = run is None or not run.goes_on
        if starts and len(self._roster.runs) >= RUNS_OF_A_TOKEN:
            going = sum(run.goes_on and run.owner == owner for run in runs)
            if going >= RUNS_OF_A_TOKEN:
                raise _too_many(f"{going:,} runs of this token go on, it may have {RUNS_OF_A_TOKEN:,} at a time")
        if len(self._roster.agents) >= RANKS_OF_A_TOKEN:
            ranks = sum(m.owner == owner for run in runs if run.goes_on for m in run.members.values())
            if ranks >= RANKS_OF_A_TOKEN:
                raise _too_many(f"{ranks:,} ranks of this token are there, it may have {RANKS_OF_A_TOKEN:,} at a time")

    def _make_room(self, name: str) -> None:
        """For one more rank of the run of this name. The oldest runs go that ended, of the token that has most runs.

        Ends the request where all runs go on."""
        runs, agents = self._roster.runs, self._roster.agents
        while (name not in runs and len(runs) >= RUNS_KEPT) or len(agents) >= RANKS_KEPT:
            owners = Counter(run.owner for run in runs.values())
            ended = [run for run in runs.values() if not run.goes_on and run.name != name]
            if not ended:
                raise _too_many(f"The daemon keeps {RUNS_KEPT:,} runs and {RANKS_KEPT:,} ranks, and all go on")
            most = max({run.owner for run in ended}, key=lambda owner: owners[owner])
            oldest = sorted((run for run in ended if run.owner == most), key=lambda run: run.last_seen)
            reason = f"The daemon is full ({RUNS_KEPT:,} runs, {RANKS_KEPT:,} ranks): it was an old one that had ended."
            self._delete(oldest[: max(1, RUNS_KEPT // 500)], "daemon", reason)

    def tick(self, now: float) -> None:
        """Forgets runs that ended long ago; `now` is on the monotonic clock. To be called several times a second."""
        if now - self._swept_at < SWEEP_SECONDS:
            return
        before = self._clock.wall() - self._keep_seconds
        old = [run for run in self._roster.runs.values() if not run.goes_on and run.last_seen < before]
        if old:
            days = self._keep_seconds / 86_400
            self._delete(old[:DELETED_AT_ONCE], "daemon", f"It ended more than {days:g} days ago (--keep-runs).")
        if len(old) <= DELETED_AT_ONCE:
            self._swept_at = now

    def fit_steps(self, now: float) -> None:
        """Where the steps of a token's ranks take too much memory, those of each rank that has more than its share are
        cut to that. To be called several times a second; `now` is on the monotonic clock."""
        if now - self._fitted_at < FIT_SECONDS:
            return
        self._fitted_at = now
        of_token = defaultdict[str, list[Member]](list)
        for run in self._roster.runs.values():
            for member in run.members.values():
                if member.recent:
                    of_token[member.owner].append(member)
        for members in of_token.values():
            share = STEPS_BYTES_OF_A_TOKEN // len(members)
            if sum(member.recent_bytes for member in members) > STEPS_BYTES_OF_A_TOKEN:
                for member in members:
                    if member.recent_bytes > share:
                        member.keep(fitted(member.recent, share))

    def forget_gone(self) -> None:
        """Drops from memory what ranks told that are gone, but for those that went last. To be called now and then."""
        gone = [m for run in self._roster.runs.values() for r, m in run.members.items() if r not in run.control.present]
        gone.sort(key=lambda member: member.last_seen, reverse=True)
        for member in gone[GONE_RANKS_KEPT:]:
            member.forget()
            self._history.forget(member.hello.agent)
        for member in gone[LAST_STEPS_KEPT:]:
            member.keep(())

    def _delete(self, runs: Sequence[Run], actor: str, reason: str) -> None:
        at = self._clock.wall()
        agents = {member.hello.agent for run in runs for member in run.members.values()}
        self._history.erase(agents)
        notes = [note(run.name, at, actor, DELETED, before=run.control.committed.knobs, reason=reason) for run in runs]
        self._store.delete_runs([run.name for run in runs], notes)
        for agent in agents:
            self._roster.agents.pop(agent, None)
        for run in runs:
            del self._roster.runs[run.name]
            self._trials.forget(run.name)
            self.deleted(run.name)
            run.bell.ring()
            run.orders.ring()


def _too_many(why: str) -> ProblemError:
    remedy = "end some of them, or use a token of its own for each team: `tidegate token create agent --name TEAM`"
    return ProblemError(409, "too-many-runs", f"{why}: {remedy}.")
