"""Receives knobs from the daemon by long polls, and votes on knobs that the daemon proposes: it answers whether this
rank can use them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from tidegate.agent.control import link_timing
from tidegate.agent.control.committed_knobs import KnobDecisions
from tidegate.agent.control.registration import REFUSALS, Registration
from tidegate.agent.control.report_source import ReportSource
from tidegate.agent.engine.last_references import release_unless_exiting
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.wire.agent import Directive, Vote

log = logging.getLogger("tidegate.link")

CONNECTION_CHECK_SECONDS = 0.2
"""Interval in seconds at which the listen thread checks whether the link is connected."""


class KnobListener:
    """Receives knobs from the daemon in the listen thread of a link, until the event `stop` is set.

    client: connection that only this thread uses.
    source: checks proposed knobs; a reference is held only during a check.
    on_failure: called after a failed exchange, to send recent reports again, because the daemon may have lost them.
    on_exchange: called after each exchange.
    """

    def __init__(
        self,
        client: DaemonClient,
        registration: Registration,
        knobs: KnobDecisions,
        source: weakref.ReferenceType[ReportSource],
        stop: threading.Event,
        *,
        on_failure: Callable[[], None],
        on_exchange: Callable[[], None],
    ) -> None:
        self._client, self._registration, self._knobs = client, registration, knobs
        self._source, self._stop = source, stop
        self._on_failure, self._on_exchange = on_failure, on_exchange
        self._polls: deque[float] = deque(maxlen=link_timing.POLLS_AT_ONCE)
        """Start times of the most recent polls, on the monotonic clock."""

    def listen_forever(self) -> None:
        """Body of the listen thread: waits for knobs from the daemon, and votes on proposed knobs (answers whether this
        rank can use them)."""
        failures = 0
        while not self._stop.is_set():
            hello = self._registration.accepted
            if not self._registration.connected or hello is None or hello.agent != self._registration.hello.agent:
                self._stop.wait(CONNECTION_CHECK_SECONDS)
                continue
            try:
                self._listen_once(hello.agent)
                failures = 0
            except REFUSALS:
                # The report thread registers again.
                failures += 1
                self._on_failure()
                self._stop.wait(link_timing.backoff(failures))
            self._on_exchange()
        self._client.close()

    def _listen_once(self, agent: str) -> None:
        """Sends one long poll and accepts the committed knobs in the response. Then votes on each generation that the
        daemon proposes: answers whether this rank can use it. `agent`: id under which this rank is registered."""
        knobs, poll_seconds = self._knobs, link_timing.POLL_SECONDS
        self._wait_for_turn()
        directive = self._client.directive(agent, max(0, knobs.newest_generation), knobs.voted, poll_seconds)
        knobs.take(directive)
        while directive.proposed is not None and directive.proposed != knobs.voted:
            generation = directive.proposed
            self._wait_for_turn()
            directive = self._client.vote(agent, self._vote(directive), poll_seconds)
            knobs.voted = generation
            knobs.take(directive)

    def _wait_for_turn(self) -> None:
        """Waits until the limits POLLS_AT_ONCE and POLLS_PER_SECOND allow the next poll or vote."""
        now = time.monotonic()
        if len(self._polls) == link_timing.POLLS_AT_ONCE:
            self._stop.wait(self._polls[0] + link_timing.POLLS_AT_ONCE / link_timing.POLLS_PER_SECOND - now)
        self._polls.append(time.monotonic())

    def _vote(self, directive: Directive) -> Vote:
        """Checks the proposed knobs and returns this rank's vote: whether it can use them. If the check raises an
        unexpected error, the vote is no: without a vote, the daemon would wait until its deadline and then count a
        no."""
        assert directive.proposed is not None
        held, reason = [self._source()], ""
        try:
            if held[0] is not None:
                held[0].check(Knobs().changed(directive.proposed_knobs or {}))
        except ConfigError as refusal:
            reason = str(refusal)
        except Exception as error:
            log.exception(
                "the proposed knobs could not be checked, so this rank votes against them; training goes on",
                extra=event("check_failed", generation=directive.proposed),
            )
            reason = f"The rank could not check these knobs ({type(error).__name__}: {error}); its log says more."
        finally:
            release_unless_exiting(held)
        return Vote(generation=directive.proposed, can=not reason, reason=reason)
