"""Registry of runs, ranks and agents, with the liveness of each rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from tidegate.daemon.control.event_ids import EventIds
from tidegate.daemon.control.liveness import STALE_LEASES
from tidegate.daemon.control.run import Clocks, Member, Run
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.row_reader import REMEDY
from tidegate.wire.agent import AgentHello, Holder
from tidegate.wire.base import Liveness

MAX_LISTED: Final = 10
"""Maximum number of names of runs or ranks that a message lists."""


class RunRegistry:
    """Holds all runs, ranks and agents in memory, and finds them by name. For an unknown name a look-up raises
    ProblemError (status 404); for runs and ranks, its text lists the known names."""

    def __init__(
        self,
        runs: dict[str, Run],
        agents: dict[str, tuple[str, int]],
        lease_seconds: float,
        clock: Clocks,
        event_ids: EventIds,
        damaged: Collection[str] = (),
    ) -> None:
        """`damaged`: names of stored runs whose rows cannot be read."""
        self.runs = runs
        self.agents = agents
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._event_ids = event_ids
        self._damaged = frozenset(damaged)

    def run(self, name: str) -> Run:
        if name not in self.runs:
            self._check_damaged(name)
            raise ProblemError(404, "unknown-run", f"There is no run {name!r}. {self._known()}")
        return self.runs[name]

    def _check_damaged(self, name: str) -> None:
        if name in self._damaged:
            detail = f"What is stored of run {name!r} cannot be read: {REMEDY}; or choose another name."
            raise ProblemError(409, "run-damaged", detail)

    def _known(self) -> str:
        """The running runs and the newest ended runs, as a sentence."""
        newest = sorted(self.runs.values(), key=lambda run: -run.created_at)
        running = [run.name for run in newest if run.is_running]
        groups = (("Live", running), ("Ended", [run.name for run in newest if run.name not in set(running)]))
        lists = [f"{what}: {', '.join(names[:MAX_LISTED])}" for what, names in groups if names]
        return f"{'. '.join(lists)}." if lists else "There is none yet."

    def rank(self, name: str, rank: int) -> Member:
        run = self.run(name)
        if rank not in run.members:
            known = ", ".join(map(str, sorted(run.members))) or "none"
            raise ProblemError(404, "unknown-rank", f"Run {name!r} has no rank {rank}. Its ranks: {known}.")
        return run.members[rank]

    def member(self, agent: str) -> tuple[Run, Member]:
        """The run and the rank that the agent holds. An agent that has finished counts as unknown."""
        if seat := self.agents.get(agent):
            run = self.runs[seat[0]]
            member = run.members[seat[1]]
            if member.ended is None:
                return run, member
        raise ProblemError(
            404, "unknown-agent", f"The daemon does not know agent {agent!r}: register it first (POST /v1/agents)."
        )

    def check_free(self, hello: AgentHello) -> None:
        """Checks that the agent can hold the rank. Raises a 409 problem if another live agent holds the rank, or if
        this agent already holds another rank.

        `hello` is the message with which the agent registers. An agent that it names in `replaces` has ended, so the
        rank of that agent is free.
        """
        self._check_damaged(hello.run)
        run = self.runs.get(hello.run)
        held = run.members.get(hello.rank) if run else None
        if held and held.hello.agent not in (hello.agent, hello.replaces) and self.liveness(held) == "live":
            raise ProblemError(
                409,
                "rank-taken",
                f"Rank {hello.rank} of run {hello.run!r} is held by process {held.hello.pid} on {held.hello.host}, "
                f"which is live. Stop it, wait {self._lease_seconds:g} s if it died, or choose another run name.",
                rank=hello.rank,
                holder=Holder.model_validate(held.hello, from_attributes=True).model_dump(mode="json"),
                lease_seconds=self._lease_seconds,
            )
        if self.agents.get(hello.agent, (hello.run, hello.rank)) != (hello.run, hello.rank):
            raise ProblemError(
                409, "agent-taken", f"The agent id {hello.agent!r} is in use by another rank: choose a new one."
            )

    @property
    def lost_seconds(self) -> float:
        """Seconds without a message after which a rank is lost."""
        return STALE_LEASES * self._lease_seconds

    def liveness(self, member: Member) -> Liveness:
        return member.liveness(self._clock.mono(), self._lease_seconds)

    def states(self, run: Run) -> dict[int, Liveness]:
        return {rank: self.liveness(member) for rank, member in run.members.items()}

    def reachable(self) -> Iterator[Member]:
        """Ranks with metrics to scrape: those that are live or stale."""
        for run in self.runs.values():
            for member in run.members.values():
                if member.hello.metrics_address and self.liveness(member) in ("live", "stale"):
                    yield member

    def publish(self, run: Run, kind: str, data: dict[str, Any]) -> None:
        """Adds an event to the run's events."""
        run.publish(self._event_ids.take(), kind, self._clock.wall(), data)

    def publish_liveness(self, run: Run, member: Member) -> None:
        """Publishes an event with the liveness of a rank on the event stream of its run."""
        data = {"rank": member.hello.rank, "agent": member.hello.agent, "liveness": self.liveness(member)}
        self.publish(run, "agent", data)
