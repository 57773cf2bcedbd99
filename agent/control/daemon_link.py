"""The agent's link to the control daemon: sends a report every few seconds and receives knobs. Training never waits for
the daemon."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tidegate.agent.control import link_timing
from tidegate.agent.control.committed_knobs import CommittedKnobs, KnobDecisions
from tidegate.agent.control.knob_listener import KnobListener
from tidegate.agent.control.refusal_log import RefusalLog
from tidegate.agent.control.registration import REFUSALS, Registration
from tidegate.agent.control.report_source import ReportSource
from tidegate.agent.engine.last_references import release_unless_exiting
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError, DaemonError, DaemonUnreachable, NotAuthorized, NotFound, RankTaken
from tidegate.logs import event
from tidegate.wire.agent import AgentHello, AgentReport

log = logging.getLogger("tidegate.link")


@dataclass(frozen=True)
class _Goodbye:
    """Message to the report thread to end the link. `report`: the final report; None when it could not be built.
    `error`: name of the type of the exception by which the training failed; empty for none."""

    report: AgentReport | None
    error: str = ""


_open_links: set[AgentLink] = set()
"""Links whose report threads have not ended."""


class AgentLink:
    """The agent's link to the daemon, with two threads: one sends reports, one listens for knobs (`KnobListener`). Both
    keep retrying, with back-off, while the daemon is unavailable.

    The object `source` builds the reports. The threads hold a reference to it only during calls, so that it can be
    garbage-collected. `leave` or `close` ends the threads.
    """

    def __init__(self, url: str, token: str | None, hello: AgentHello, source: ReportSource) -> None:
        self.cpu_seconds = 0.0
        self._source = weakref.ref(source)
        self._client, listener_client = (
            DaemonClient(url, token, link_timing.ANSWER_SECONDS, max_answer_bytes=link_timing.MAX_ANSWER_BYTES)
            for _ in range(2)
        )
        self._listener_client = listener_client
        self._stop = threading.Event()
        self._requests: SimpleQueue[_Goodbye | None] = SimpleQueue()
        """Queue that wakes the report thread: None asks for a report, a `_Goodbye` ends the link. Destructors call
        `put`, too, at any moment, even inside another `put`: that would deadlock a Queue, but not a SimpleQueue."""
        self._knobs = KnobDecisions(hello.run, self._wake)
        self._refusals = RefusalLog(hello.run, hello.rank)
        self._registration = Registration(self._client, hello, self._knobs, self._refusals)
        self._identity_lock = threading.Lock()
        """Lock that is held while a report is built or the agent's id changes, so that each report belongs to one
        id."""
        self._cpu: dict[str, float] = {}
        self._wanted_pause: float | None = None
        self._delivered: deque[tuple[float, AgentReport]] = deque()
        """Recently delivered reports, each with its time on the monotonic clock."""
        self._logged_report_failure = False
        """Whether it was logged that a report could not be made."""
        self.restarts = 0
        """Number of times that a thread failed and was restarted."""
        listener = KnobListener(
            listener_client, self._registration, self._knobs, self._source, self._stop,
            on_failure=self._requeue_recent, on_exchange=lambda: self._count("listen"),
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=self._run_forever, args=(name, work), name=f"tidegate-link-{name}", daemon=True)
            for name, work in (("report", self._report_forever), ("listen", listener.listen_forever))
        ]

    @property
    def committed(self) -> CommittedKnobs | None:
        """Newest knobs that the daemon has committed and that can be used; the training thread applies them. None
        before the first."""
        return self._knobs.committed

    @property
    def connected(self) -> bool:
        """Whether the daemon has accepted this rank, and the last exchange of the report thread with it worked."""
        return self._registration.connected

    @property
    def refused(self) -> str:
        """What the daemon refuses now: the `token`, or the `rank`. Empty for nothing."""
        return self._refusals.refused

    def start(self, strict: bool = False) -> None:
        """Sends the first registration message (hello), then starts the threads. If the daemon is unavailable or
        refuses the rank, that is logged, and the threads try again while training runs.

        strict: True raises RankTaken if the agent that holds the rank is certainly alive or still holds the rank after
            the time for which the daemon reserves it (LONGEST_STRICT_SECONDS at most), and NotAuthorized for a wrong
            token.
        """
        try:
            self._registration.say_first_hello(strict)
        except BaseException:
            self._client.close()
            self._listener_client.close()
            raise
        _open_links.add(self)
        for thread in self._threads:
            thread.start()

    def applied(self, generation: int, step: int) -> None:
        """Tells the daemon, with the next report, that `generation` is in force from `step` on."""
        self._knobs.report_applied(generation, step)

    def report_unusable(self, decision: tuple[int, int], reason: str) -> bool:
        """Tells the daemon, right after the next report, that a committed generation cannot be used on this rank.
        `decision`: epoch (how often the daemon has lost its state) and generation. Returns False, and sends nothing, if
        that was reported before."""
        return self._knobs.report_unusable(decision, reason)

    def update_hello(self, hello: AgentHello) -> None:
        """Replaces the registration message. The daemon gets the new one before the next report."""
        self._registration.hello = hello
        self._wake()

    def restart_as(self, hello: AgentHello, forget: Callable[[], None]) -> None:
        """Registers as a new agent after the rank loaded another state. Steps of the old agent that were not delivered
        are discarded: the function `forget` removes them from the recorder, and is called while no report is built."""
        with self._identity_lock:
            registration = self._registration
            registration.hello = hello.model_copy(update={"replaces": registration.hello.agent})
            self._delivered.clear()
            self._knobs.forget_applied()
            forget()
        self._wake()

    def leave(self, report: AgentReport | None, error: str) -> None:
        """Queues the final report and the goodbye message, which are sent if the daemon can be reached. Takes no lock
        and returns without waiting. `error`: name of the type of the exception by which the training failed."""
        self._requests.put(_Goodbye(report, error))

    def close(self, seconds: float = link_timing.LONGEST_GOODBYE_SECONDS) -> None:
        """Queues a goodbye message, unless the link has ended, and waits until it is sent, for `seconds` at most."""
        if self._threads[0].is_alive():
            self._requests.put(_Goodbye(None))
            self._threads[0].join(timeout=seconds)

    # ---- both threads

    def _run_forever(self, name: str, work: Callable[[], None]) -> None:
        """Body of both threads: runs `work`, and runs it again after an unexpected error."""
        failures = 0
        while True:
            try:
                work()
                return
            except Exception:
                failures += 1
                self.restarts += 1
                hello = self._registration.hello
                log.exception(
                    "thread %r of the link to the daemon failed and is restarted; training goes on", name,
                    extra=event("link_failed", run=hello.run, rank=hello.rank, thread=name),
                )  # fmt: skip
                if self._stop.wait(link_timing.backoff(failures)):
                    return

    def _wake(self) -> None:
        """Asks the report thread for a report."""
        self._requests.put(None)

    def _count(self, thread: str) -> None:
        """Updates `cpu_seconds` with the CPU time of the calling thread. `thread`: its name."""
        self._cpu[thread] = time.thread_time()
        self.cpu_seconds = sum(self._cpu.values())

    # ---- reporting

    def _report_forever(self) -> None:
        """Sends reports until a goodbye is queued."""
        failures, pause = 0, link_timing.REPORT_SECONDS
        while True:
            waits = self._refusals.pause or (link_timing.backoff(failures) if failures else pause)
            goodbye = self._wait(waits)
            if goodbye is not None:
                self._say_goodbye(goodbye)
                return
            began = time.thread_time()
            try:
                failures = 0 if self._deliver_or_log() else failures + 1
            except REFUSALS as error:
                failures += 1
                self._on_refusal(error)
            pause = link_timing.pause_after_report(time.thread_time() - began, self._wanted_pause)
            self._count("report")

    def _wait(self, seconds: float) -> _Goodbye | None:
        """Waits for `seconds`, or until a report is requested or a goodbye is queued. Returns the goodbye; None if
        there is none."""
        with contextlib.suppress(Empty):
            message = self._requests.get(timeout=seconds)
            while message is None:
                message = self._requests.get_nowait()
            return message
        return None

    def _say_goodbye(self, goodbye: _Goodbye) -> None:
        """Sends the final report and the goodbye message, and ends the link. Errors are ignored."""
        self._stop.set()
        accepted = self._registration.accepted
        try:
            if self.connected and accepted is not None:
                with contextlib.suppress(*REFUSALS):
                    if goodbye.report is not None:
                        self._send(accepted, goodbye.report, final=not goodbye.error)
                    self._client.goodbye(accepted.agent, goodbye.error)
        finally:
            self._client.close()  # the listen thread ends after the goodbye, and closes its own client
            _open_links.discard(self)

    def _deliver_or_log(self) -> bool:
        """Sends a report and returns True. After an unexpected error it returns False: the first such error is logged,
        and later reports are still sent. Errors of the exchange with the daemon (`REFUSALS`) are raised."""
        try:
            self._deliver()
        except REFUSALS:
            raise
        except Exception:
            if not self._logged_report_failure:
                log.exception(
                    "a report could not be made for the daemon; training and later reports go on",
                    extra=event("report_failed"),
                )
            self._logged_report_failure = True
            return False
        return True

    def _deliver(self) -> None:
        """Registers if necessary, then sends a report and, if there is one, the message that a committed generation
        cannot be used on this rank."""
        registration = self._registration
        while True:
            hello = registration.hello
            if not registration.connected or registration.accepted is not hello:
                was_away = not registration.connected
                registration.register(hello)
                if was_away:
                    log.info("the daemon is available again", extra=event("daemon_back"))
            with self._identity_lock:
                if registration.hello is hello:
                    report = self._build_report()
                    break
        if report is not None:
            self._send(hello, report)
        self._send_unusable(hello)

    def _send_unusable(self, hello: AgentHello) -> None:
        """Sends the message, if there is one, that a committed generation cannot be used on this rank. If the daemon
        cannot be reached, or no longer knows this agent, the message is kept for later and the error is raised. If the
        daemon refuses the message, that is only logged."""
        unusable = self._knobs.take_unusable()
        if unusable is None:
            return
        try:
            self._knobs.take(self._client.vote(hello.agent, unusable))
        except (DaemonUnreachable, NotFound):
            self._knobs.restore_unusable(unusable)
            raise
        except REFUSALS as error:
            log.debug("the daemon refused the vote against generation %d: %s", unusable.generation, error)

    def _build_report(self) -> AgentReport | None:
        """Builds the next report. Returns None if the source of reports is garbage-collected: it has then queued its
        final report already."""
        held = [self._source()]
        try:
            return held[0].report() if held[0] is not None else None
        finally:
            release_unless_exiting(held)

    def _send(self, hello: AgentHello, report: AgentReport, final: bool = False) -> None:
        """Sends a report. On an error the report goes back to its source, to be sent again, and the error is raised.

        hello: the registration message of the agent to which the report belongs.
        final: True for the last report of a training that did not fail.
        """
        applied = self._knobs.take_applied()
        try:
            message = report.model_copy(update={"applied": applied, "finished": final})
            lease = self._client.report(hello.agent, message)
        except Exception as error:
            with self._identity_lock:
                if self._registration.hello.agent == hello.agent:
                    self._requeue(report)
                    self._knobs.restore_applied(applied)
            if isinstance(error, NotFound):
                self._registration.connected = False
            raise
        with self._identity_lock:
            if self._registration.hello.agent == hello.agent:
                self._keep(report, time.monotonic())
        self._wanted_pause = lease.report_seconds
        self._knobs.take(lease.directive)

    def _requeue(self, report: AgentReport) -> None:
        """Gives a report that was not delivered back to its source."""
        held = [self._source()]
        if held[0] is not None:
            held[0].undelivered(report)
        release_unless_exiting(held)

    def _keep(self, report: AgentReport, now: float) -> None:
        """Stores a delivered report for RESEND_SECONDS, because it is sent again if an exchange with the daemon fails
        in this time. `now`: the present time on the monotonic clock."""
        self._delivered.append((now, report))
        with contextlib.suppress(IndexError):  # the other thread may have taken them all
            while self._delivered[0][0] < now - link_timing.RESEND_SECONDS:
                self._delivered.popleft()

    def _requeue_recent(self) -> None:
        """Gives recently delivered reports back to their source, so that they are sent again: a daemon that was killed
        may have lost them. The daemon ignores steps that it already has."""
        with self._identity_lock, contextlib.suppress(IndexError):
            while True:
                self._requeue(self._delivered.pop()[1])  # newest first, so that the oldest is sent first

    def _on_refusal(self, error: DaemonError | ConfigError) -> None:
        """Handles a failed exchange with the daemon: logs it once per outage, marks the link as disconnected, and
        queues recent reports again."""
        if isinstance(error, RankTaken):
            self._refusals.rank_taken(error)
        elif isinstance(error, NotAuthorized):
            self._refusals.token_refused(error)
        elif self._registration.connected:
            log.warning(
                "the connection to the daemon is lost, training goes on with the present knobs: %s", error,
                extra=event("daemon_lost", reason=str(error)),
            )  # fmt: skip
        self._registration.connected = False
        self._requeue_recent()


def wait_for_goodbyes(seconds: float = link_timing.LONGEST_GOODBYE_SECONDS) -> None:
    """Waits until all links of this process have sent their goodbye messages, for `seconds` at most."""
    latest = time.monotonic() + seconds
    for link in tuple(_open_links):
        link.close(max(0.0, latest - time.monotonic()))
