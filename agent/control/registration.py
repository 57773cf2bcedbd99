"""Registration of a rank with the daemon by a hello message, and the handling of a rank that another agent holds."""

from __future__ import annotations

import logging
import time

from tidegate.agent.control import link_timing
from tidegate.agent.control.committed_knobs import KnobDecisions
from tidegate.agent.control.process_identity import has_ended, is_observable
from tidegate.agent.control.refusal_log import RefusalLog
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.streams import within
from tidegate.errors import ConfigError, DaemonError, NotAuthorized, RankTaken
from tidegate.logs import event
from tidegate.wire.agent import AgentHello, Holder, Lease

log = logging.getLogger("tidegate.link")

REFUSALS = (DaemonError, ConfigError)
"""Exceptions that an exchange with the daemon may raise. ConfigError is raised if the daemon refuses a knob of this
rank, for example one that it does not know."""


class Registration:
    """Registration message (hello) of a link to the daemon, and whether the daemon has accepted it."""

    def __init__(self, client: DaemonClient, hello: AgentHello, knobs: KnobDecisions, refusals: RefusalLog) -> None:
        self.hello = hello
        """Newest registration message (hello), whether the daemon has accepted it or not."""
        self.accepted: AgentHello | None = None
        """The last registration message (hello) that the daemon accepted."""
        self.connected = False
        self._client, self._knobs, self._refusals = client, knobs, refusals

    def say_first_hello(self, strict: bool) -> None:
        """Sends the first registration message (hello). If the daemon is unavailable or refuses the message, that is
        only logged. With `strict`, NotAuthorized and RankTaken are raised. If the agent that holds the rank may have
        ended, the message is repeated until the lease of that agent has ended, for `LONGEST_STRICT_SECONDS` at most,
        before RankTaken is raised."""
        latest: float | None = None
        while True:
            try:
                with within(link_timing.ANSWER_SECONDS):
                    self.register(self.hello)
            except RankTaken as taken:
                now = time.monotonic()
                if latest is None:
                    lease = taken.lease_seconds + link_timing.STRICT_MARGIN_SECONDS
                    latest = now + min(lease, link_timing.LONGEST_STRICT_SECONDS)
                if not strict:
                    self._refusals.rank_taken(taken)
                elif is_observable(taken.holder) or now > latest:
                    raise
                else:
                    time.sleep(link_timing.STRICT_PAUSE_SECONDS)
                    continue
            except NotAuthorized as error:
                if strict:
                    raise
                self._refusals.token_refused(error)
            except REFUSALS as error:
                log.warning(
                    "the daemon cannot be reached, training goes on without it: %s", error,
                    extra=event("daemon_away", reason=str(error)),
                )  # fmt: skip
            return

    def register(self, hello: AgentHello) -> None:
        """Registers with the daemon, and accepts the knobs of its response."""
        known = self._knobs.committed
        message = hello
        if known is not None:
            # `reset_knobs` applies only to the first hello: later knobs of operators stay in force, even if the daemon
            # lost them.
            knobs = known.knobs.as_dict(paths=bool(hello.paths))
            message = hello.model_copy(update={"reset_knobs": False, "knobs": knobs})
        self._knobs.take_at_registration(self._send(message).directive, known)
        self.accepted = hello
        self.connected = True
        self._refusals.accepted()

    def _send(self, hello: AgentHello) -> Lease:
        """Sends the registration message (hello). If the rank is held by a process that has ended, or by an earlier
        attachment of this process, the new agent replaces the holder. Raises RankTaken if another process that may be
        alive holds the rank."""
        try:
            return self._client.hello(hello)
        except RankTaken as taken:
            holder = taken.holder
            if holder is None or not (_is_same_process(hello, holder) or has_ended(holder)):
                raise
            return self._client.hello(hello.model_copy(update={"replaces": holder.agent}))


def _is_same_process(hello: AgentHello, holder: Holder) -> bool:
    """Whether the process that sends this registration message already holds the rank, from an earlier attachment."""
    return holder.process is not None and (hello.process, hello.host) == (holder.process, holder.host)
