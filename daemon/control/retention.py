"""Retention of runs: limits on the age and number of runs, quotas for each token, and deletion.

A run is running while any of its ranks is live or stale. A running run is never deleted; a quota for each token keeps
one token from using all places. Runs that have ended are deleted to make room for new runs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from tidegate.daemon.control.audit_rows import note
from tidegate.daemon.control.registry import MAX_LISTED, RunRegistry
from tidegate.daemon.control.run import Clocks, Member, Run
from tidegate.daemon.control.step_memory import fit_into_memory
from tidegate.daemon.control.step_writer import StepWriter
from tidegate.daemon.control.trials import Trials
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.store import Store
from tidegate.wire.agent import AgentHello

RUNS_KEPT: Final = 10_000
"""Maximum number of runs in the daemon. Above it, the oldest runs that have ended are deleted."""
RANKS_KEPT: Final = 100_000
"""Maximum number of ranks in the daemon, over all runs."""
RUNS_OF_A_TOKEN: Final = 2_000
"""Maximum number of runs of one token that are running at the same time."""
RANKS_OF_A_TOKEN: Final = 20_000
"""Maximum number of ranks of one token, over all its running runs."""
GONE_RANKS_KEPT: Final = 64
"""Maximum number of lost or finished ranks whose newest steps stay in memory."""
LAST_STEPS_KEPT: Final = 4_096
"""Maximum number of lost or finished ranks whose last step stays in memory. The last step of other ranks is read from
the store when their run is requested."""
STEPS_BYTES_OF_A_TOKEN: Final = 384 << 20
"""Limit of the estimated memory in bytes of the steps of one token's ranks. It is enough for the complete last step of
each of 512 ranks with 64 paths."""
FIT_SECONDS: Final = 1.0
"""Seconds between two checks that the steps in memory are within `STEPS_BYTES_OF_A_TOKEN`."""
DELETED_AT_ONCE: Final = 20
"""Maximum number of runs that are deleted in one transaction, because other changes wait until it ends."""
SWEEP_SECONDS: Final = 30.0
"""Time between two searches for old runs."""
DELETED: Final = "deleted"
"""Name of the action in the row of the audit log that records the deletion of a run."""


class Retention:
    """Deletes runs that are old or above a limit, and refuses ranks above a token's quota.

    keep_seconds: ended runs are kept for this time after the last message of a rank. The attribute `deleted` is a
    callback, which is called with the name of each deleted run.
    """

    def __init__(
        self,
        store: Store,
        registry: RunRegistry,
        step_writer: StepWriter,
        trials: Trials,
        clock: Clocks,
        keep_seconds: float,
    ) -> None:
        self._store = store
        self._registry = registry
        self._step_writer = step_writer
        self._trials = trials
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._swept_at = -math.inf
        self._fitted_at = -math.inf
        self.deleted: Callable[[str], None] = lambda run: None

    def delete(self, run: Run, actor: str, reason: str = "") -> None:
        """Deletes the run. Raises a 409 problem while it is running."""
        states = sorted(self._registry.states(run).items())
        running = [f"rank {rank} is {state}" for rank, state in states if state in ("live", "stale")]
        if running:
            detail = (
                f"Run {run.name!r} is running ({', '.join(running[:MAX_LISTED])}): end its processes, wait until a "
                f"rank that died is lost ({self._registry.lost_seconds:g} s after its last message), then delete it."
            )
            raise ProblemError(409, "run-goes-on", detail)
        self._delete([run], actor, reason)

    def admit(self, hello: AgentHello, owner: str) -> None:
        """Makes room for a new rank, by deleting old runs. Raises a 409 problem if its token is over its quota."""
        run = self._registry.runs.get(hello.run)
        known = run is not None and hello.rank in run.members
        if run is None or not known or not run.is_running:
            self.check_quota(run, owner)
        if not known:
            self._make_room(hello.run)

    def check_quota(self, run: Run | None, owner: str) -> None:
        """Raises a 409 problem if one more rank would put the token over its quota of running runs or ranks.

        run: the rank's run; None for a new run.
        """
        runs = self._registry.runs.values()
        starts = run is None or not run.is_running
        if starts and len(self._registry.runs) >= RUNS_OF_A_TOKEN:
            running = sum(run.is_running and run.owner == owner for run in runs)
            if running >= RUNS_OF_A_TOKEN:
                raise _too_many(f"{running:,} runs of this token are running, at most {RUNS_OF_A_TOKEN:,} are allowed")
        if len(self._registry.agents) >= RANKS_OF_A_TOKEN:
            ranks = sum(m.owner == owner for run in runs if run.is_running for m in run.members.values())
            if ranks >= RANKS_OF_A_TOKEN:
                raise _too_many(f"{ranks:,} ranks of this token are running, at most {RANKS_OF_A_TOKEN:,} are allowed")

    def _make_room(self, name: str) -> None:
        """Makes room for one more rank of the run `name`: deletes the oldest ended runs of the token with most runs.

        Raises a 409 problem if all runs are running.
        """
        runs, agents = self._registry.runs, self._registry.agents
        while (name not in runs and len(runs) >= RUNS_KEPT) or len(agents) >= RANKS_KEPT:
            owners = Counter(run.owner for run in runs.values())
            ended = [run for run in runs.values() if not run.is_running and run.name != name]
            if not ended:
                raise _too_many(f"The daemon keeps {RUNS_KEPT:,} runs and {RANKS_KEPT:,} ranks, and all are running")
            most = max({run.owner for run in ended}, key=lambda owner: owners[owner])
            oldest = sorted((run for run in ended if run.owner == most), key=lambda run: run.last_seen)
            reason = f"The daemon is full ({RUNS_KEPT:,} runs, {RANKS_KEPT:,} ranks), and this was an old ended run."
            self._delete(oldest[: max(1, RUNS_KEPT // 500)], "daemon", reason)

    def tick(self, now: float) -> None:
        """Deletes runs that ended long ago. `now` is on the monotonic clock. Call it several times a second."""
        if now - self._swept_at < SWEEP_SECONDS:
            return
        before = self._clock.wall() - self._keep_seconds
        old = [run for run in self._registry.runs.values() if not run.is_running and run.last_seen < before]
        if old:
            days = self._keep_seconds / 86_400
            self._delete(old[:DELETED_AT_ONCE], "daemon", f"It ended more than {days:g} days ago (--keep-runs).")
        if len(old) <= DELETED_AT_ONCE:
            self._swept_at = now

    def fit_steps(self, now: float) -> None:
        """Limits the memory for the steps of each token's ranks to `STEPS_BYTES_OF_A_TOKEN`.

        Above this limit each rank gets an equal share, and the steps of ranks that use more than their share are
        reduced. Call it several times a second. `now` is on the monotonic clock.
        """
        if now - self._fitted_at < FIT_SECONDS:
            return
        self._fitted_at = now
        of_token = defaultdict[str, list[Member]](list)
        for run in self._registry.runs.values():
            for member in run.members.values():
                if member.recent:
                    of_token[member.owner].append(member)
        for members in of_token.values():
            share = STEPS_BYTES_OF_A_TOKEN // len(members)
            if sum(member.recent_bytes for member in members) > STEPS_BYTES_OF_A_TOKEN:
                for member in members:
                    if member.recent_bytes > share:
                        member.set_recent(fit_into_memory(member.recent, share))

    def forget_gone(self) -> None:
        """Drops steps and timelines of lost and finished ranks from memory, except for the ranks with the latest
        messages. Call it about every half minute."""
        gone = [
            m for run in self._registry.runs.values() for r, m in run.members.items() if r not in run.control.present
        ]
        gone.sort(key=lambda member: member.last_seen, reverse=True)
        for member in gone[GONE_RANKS_KEPT:]:
            member.forget()
            self._step_writer.forget(member.hello.agent)
        for member in gone[LAST_STEPS_KEPT:]:
            member.set_recent(())

    def _delete(self, runs: Sequence[Run], actor: str, reason: str) -> None:
        at = self._clock.wall()
        agents = {member.hello.agent for run in runs for member in run.members.values()}
        self._step_writer.erase(agents)
        notes = [note(run.name, at, actor, DELETED, before=run.control.committed.knobs, reason=reason) for run in runs]
        self._store.delete_runs([run.name for run in runs], notes)
        for agent in agents:
            self._registry.agents.pop(agent, None)
        for run in runs:
            del self._registry.runs[run.name]
            self._trials.forget(run.name)
            self.deleted(run.name)
            run.event_notifier.notify_all()
            run.directive_notifier.notify_all()


def _too_many(why: str) -> ProblemError:
    remedy = "end some of them, or use a token of its own for each team: `tidegate token create agent --name TEAM`"
    return ProblemError(409, "too-many-runs", f"{why}: {remedy}.")
