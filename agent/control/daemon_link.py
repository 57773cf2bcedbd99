"""The agent's link to the control daemon: sends a report every few seconds and receives knobs. Training never waits for
it."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from tidegate.agent.control.process_identity import has_ended, is_observable
from tidegate.agent.control.refusal_log import RefusalLog
from tidegate.agent.engine.last_references import release_unless_exiting
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.streams import within
from tidegate.errors import ConfigError, DaemonError, DaemonUnreachable, NotAuthorized, NotFound, RankTaken
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.wire.agent import AgentHello, AgentReport, Applied, Directive, Holder, Lease, Vote

log = logging.getLogger("tidegate.link")

REPORT_SECONDS = 1.0
LONGEST_REPORT_SECONDS = 4.0
REPORT_SHARE = 1e-3
"""Largest share of one core that reports may take: the more CPU time a report costs (large plans, a slow machine), the
rarer reports are, between the two bounds. Knobs and votes, which operators wait for, do not wait for a report. While a
canary is judged, the daemon may ask for more reports, within `TRIAL_SHARE`."""
TRIAL_SHARE = 1e-2
"""The same share while a canary is judged, which takes some steps: with `REPORT_SHARE`, harm would last twice as
long."""
POLL_SECONDS = 20.0
"""How long the daemon may delay the response to a long poll."""
RESEND_SECONDS = 3.0
"""The daemon writes reports to disk once a second. If it was killed, all reports that arrived in this time before the
newest one are sent again."""
MAX_BACKOFF_SECONDS = 5.0
_SPREAD = random.SystemRandom()
"""Not the generator of the module `random`: a script may have seeded that."""
ANSWER_SECONDS = 5.0
"""Time limit of one exchange with the daemon, in addition to the wait of a long poll. Also the limit of the whole first
hello."""
MAX_ANSWER_BYTES = 1 << 20
"""Limit of a response: a lease or a directive has a few hundred bytes."""
POLLS_AT_ONCE, POLLS_PER_SECOND = 20, 5.0
"""Burst and rate of polls and votes. They limit requests to a daemon that responds to each one at once."""
LONGEST_GOODBYE_SECONDS = 10.0
REFUSED = (DaemonError, ConfigError)
"""Errors of an exchange with the daemon. ConfigError: a knob that the daemon does not know."""
STRICT_PAUSE_SECONDS = 0.5
"""Pause between two hellos for a rank that is held by another agent, with `strict`."""
STRICT_MARGIN_SECONDS = 1.0
"""Time to wait beyond the lease of an agent that may have ended."""
LONGEST_STRICT_SECONDS = 60.0
"""Limit of the wait for a rank that is held, whatever lease the daemon names."""
LONGEST_REASON = 2_000
"""Maximum number of characters of the reason why a generation cannot be used."""
SHORTEST_REPORT_SECONDS = 0.1
"""Least pause between two reports, whatever the daemon asks for."""


@dataclass(frozen=True)
class CommittedKnobs:
    """Knobs that all live ranks have accepted."""

    generation: int
    knobs: Knobs
    epoch: int = 0
    """Number of times that the daemon has lost its state: its generations then count from 0 again."""

    @property
    def decision(self) -> tuple[int, int]:
        """Identity of the decision among all decisions of this run: epoch and generation."""
        return self.epoch, self.generation


class ReportSource(Protocol):
    """Owner of a link. Its methods are called by the threads of the link."""

    def report(self) -> AgentReport:
        """Builds the report of everything since the last report."""

    def undelivered(self, report: AgentReport) -> None:
        """Takes back a report that could not be delivered."""

    def check(self, knobs: Knobs) -> None:
        """ConfigError when the knobs cannot work on this rank."""


@dataclass(frozen=True)
class _Goodbye:
    """Request to end the link, with the final report; None when no report could be made."""

    report: AgentReport | None


_open_links: set[AgentLink] = set()
"""Links whose threads have not ended yet."""


class AgentLink:
    """Link with two threads: one sends reports, one listens for knobs. Both keep retrying, with back-off, while the
    daemon is unavailable.

    The threads hold a reference to `source` only during calls, so that it can be garbage-collected. `committed` is the
    newest decision of the daemon; the training thread applies it. `leave` or `close` ends the threads.
    """

    def __init__(self, url: str, token: str | None, hello: AgentHello, source: ReportSource) -> None:
        self.committed: CommittedKnobs | None = None
        self.connected = False
        self.cpu_seconds = 0.0
        self._hello = hello
        self._greeted: AgentHello | None = None
        """The last hello that the daemon accepted."""
        self._source = weakref.ref(source)
        self._client, self._listener_client = (
            DaemonClient(url, token, ANSWER_SECONDS, max_answer_bytes=MAX_ANSWER_BYTES) for _ in range(2)
        )
        self._stop = threading.Event()
        self._box: SimpleQueue[_Goodbye | None] = SimpleQueue()
        """Queue that wakes the report thread. A SimpleQueue, because garbage collection may put into it while locks are
        held."""
        self._lock = threading.Lock()
        self._identity_lock = threading.Lock()
        """Held while a report is made and while the agent's id changes: a report belongs to one id."""
        self._heard = -1
        """Newest generation that the daemon named as committed, usable or not."""
        self._voted: int | None = None
        self._applied: Applied | None = None
        self._unusable: Vote | None = None
        """Vote against a committed generation that cannot be used; not sent yet."""
        self._refused: set[tuple[int, int]] = set()
        """Decisions that were logged and reported as unusable."""
        self._cpu: dict[str, float] = {}
        self._wanted_pause: float | None = None
        self._delivered: deque[tuple[float, AgentReport]] = deque()
        """Recently delivered reports, each with its time on the monotonic clock."""
        self._logged_report_failure = False
        """Whether it was logged that a report could not be made."""
        self.restarts = 0
        """Number of times that a thread failed and was restarted."""
        self._polls: deque[float] = deque(maxlen=POLLS_AT_ONCE)
        """Start times of the most recent polls, on the monotonic clock."""
        self._refusals = RefusalLog(hello.run, hello.rank)
        self._threads = [
            threading.Thread(target=self._run_forever, args=(name, work), name=f"tidegate-link-{name}", daemon=True)
            for name, work in (("report", self._report_forever), ("listen", self._listen_forever))
        ]

    def start(self, strict: bool = False) -> None:
        """Sends the first hello, then starts the threads. Whatever the daemon responds, training begins and the link
        tries again.

        strict: RankTaken when it is certain that the agent that holds the rank is alive; NotAuthorized for a wrong
        token.
        """
        try:
            self._first_hello(strict)
        except BaseException:
            self._client.close()
            self._listener_client.close()
            raise
        _open_links.add(self)
        for thread in self._threads:
            thread.start()

    def applied(self, generation: int, step: int) -> None:
        """Reports, with the next report, that `generation` is in force from `step` on."""
        with self._lock:
            self._applied = Applied(generation=generation, step=step)
        self._box.put(None)

    def report_unusable(self, decision: tuple[int, int], reason: str) -> bool:
        """Reports, with the next report, that a committed generation cannot be used here. False when it was reported
        before."""
        if decision in self._refused:
            return False
        self._refused.add(decision)
        self._unusable = Vote(generation=decision[1], can=False, reason=_shortened(reason))
        self._box.put(None)
        return True

    def update_hello(self, hello: AgentHello) -> None:
        """Replaces the agent's hello: the daemon gets the new one before the next report."""
        self._hello = hello
        self._box.put(None)

    def restart_as(self, hello: AgentHello, forget: Callable[[], None]) -> None:
        """Continues as a new agent, after the rank loaded another state. Undelivered steps of the old agent are
        dropped: `forget` is called while no report is made."""
        with self._identity_lock:
            self._hello = hello.model_copy(update={"replaces": self._hello.agent})
            self._delivered.clear()
            with self._lock:
                self._applied = None
            forget()
        self._box.put(None)

    def leave(self, report: AgentReport | None) -> None:
        """Queues the final report and the goodbye; they are sent if the daemon can be reached. Does not wait, and takes
        no lock."""
        self._box.put(_Goodbye(report))

    def close(self, seconds: float = LONGEST_GOODBYE_SECONDS) -> None:
        """Queues a goodbye, unless the link has ended, and waits until it is sent, for `seconds` at most."""
        if self._threads[0].is_alive():
            self._box.put(_Goodbye(None))
            self._threads[0].join(timeout=seconds)

    # ---- registration (hello)

    def _first_hello(self, strict: bool) -> None:
        """Sends the first hello. An unavailable daemon is only logged. If `strict`, a rank that is held is waited for:
        until its lease ends, for `LONGEST_STRICT_SECONDS` at most."""
        latest: float | None = None
        while True:
            try:
                with within(ANSWER_SECONDS):
                    self._greet(self._hello)
            except RankTaken as taken:
                now = time.monotonic()
                if latest is None:
                    latest = now + min(taken.lease_seconds + STRICT_MARGIN_SECONDS, LONGEST_STRICT_SECONDS)
                if not strict:
                    self._refusals.rank_taken(taken)
                elif is_observable(taken.holder) or now > latest:
                    raise
                else:
                    time.sleep(STRICT_PAUSE_SECONDS)
                    continue
            except NotAuthorized as error:
                if strict:
                    raise
                self._refusals.token_refused(error)
            except REFUSED as error:
                log.warning("daemon away, training goes on: %s", error, extra=event("daemon_away", reason=str(error)))
            return

    def _greet(self, hello: AgentHello) -> None:
        """Registers with the daemon. Its response is accepted even if its generation is older: a daemon that lost its
        state starts over with this rank's knobs."""
        known = self.committed
        message = hello
        if known is not None:
            # `reset_knobs` applies only to the first hello: later knobs of operators stay in force, even if the daemon
            # lost them.
            message = hello.model_copy(update={"reset_knobs": False, "knobs": known.knobs.as_dict()})
        directive = self._register(message).directive
        with self._lock:
            epoch = known.epoch if known is not None else 0
            starts_over = known is not None and directive.committed < self._heard
            if starts_over or directive.committed >= self._heard:
                self._accept(directive, epoch + starts_over)
            self._voted = None
        self._greeted = hello
        self.connected = True
        self._refusals.accepted()

    def _register(self, hello: AgentHello) -> Lease:
        """Sends a hello. RankTaken while the rank is held by a process that may be alive. An agent whose process has
        ended is replaced, and so is an earlier attachment of this process."""
        try:
            return self._client.hello(hello)
        except RankTaken as taken:
            holder = taken.holder
            if holder is None or not (_is_same_process(hello, holder) or has_ended(holder)):
                raise
            return self._client.hello(hello.model_copy(update={"replaces": holder.agent}))

    def _take(self, directive: Directive) -> None:
        """Accepts the committed knobs of a response, if they are new."""
        with self._lock:
            if directive.committed > self._heard:
                self._accept(directive, self.committed.epoch if self.committed is not None else 0)

    def _accept(self, directive: Directive, epoch: int) -> None:
        """Makes the committed knobs the ones in force, if they can be used; otherwise the earlier knobs stay. Call it
        with the lock."""
        self._heard = directive.committed
        try:
            knobs = Knobs().changed(directive.committed_knobs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
            if not self.report_unusable((epoch, directive.committed), reason):
                return
            log.error(
                "generation %d cannot be used here, last good knobs stay: %s", directive.committed, reason,
                extra=event(
                    "generation_refused", run=self._hello.run, generation=directive.committed, reason=reason,
                ),
            )  # fmt: skip
        else:
            self.committed = CommittedKnobs(directive.committed, knobs, epoch)

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
                log.exception(
                    "the link's thread %r failed and is restarted; training goes on", name,
                    extra=event("link_failed", run=self._hello.run, rank=self._hello.rank, thread=name),
                )  # fmt: skip
                if self._stop.wait(_backoff(failures)):
                    return

    # ---- reporting

    def _report_forever(self) -> None:
        """Sends reports until a goodbye is queued."""
        failures, pause = 0, REPORT_SECONDS
        while True:
            goodbye = self._wait(self._refusals.pause or (_backoff(failures) if failures else pause))
            if goodbye is not None:
                self._say_goodbye(goodbye)
                return
            began = time.thread_time()
            try:
                failures = 0 if self._deliver_or_log() else failures + 1
            except REFUSED as error:
                failures += 1
                self._on_refusal(error)
            pause = _pause(time.thread_time() - began, self._wanted_pause)
            self._count("report")

    def _wait(self, seconds: float) -> _Goodbye | None:
        """Waits `seconds`, or until the box wakes the thread. Returns a queued goodbye."""
        with contextlib.suppress(Empty):
            message = self._box.get(timeout=seconds)
            while message is None:
                message = self._box.get_nowait()
            return message
        return None

    def _say_goodbye(self, goodbye: _Goodbye) -> None:
        """Sends the final report and the goodbye, and ends the link."""
        self._stop.set()
        try:
            if self.connected and self._greeted is not None:
                with contextlib.suppress(*REFUSED):
                    if goodbye.report is not None:
                        self._send(self._greeted, goodbye.report, final=True)
                    self._client.goodbye(self._greeted.agent)
        finally:
            self._client.close()  # the listen thread ends after the goodbye, and closes its own client
            _open_links.discard(self)

    def _deliver_or_log(self) -> bool:
        """Sends a report; False when it could not be made. Errors of `_send` are raised. Other errors are logged once,
        and do not prevent later reports."""
        try:
            self._deliver()
        except REFUSED:
            raise
        except Exception:
            if not self._logged_report_failure:
                log.exception("a report could not be made; training goes on", extra=event("report_failed"))
            self._logged_report_failure = True
            return False
        return True

    def _deliver(self) -> None:
        """Registers if necessary, then sends a report and a pending vote."""
        while True:
            hello = self._hello
            if not self.connected or self._greeted is not hello:
                was_away = not self.connected
                self._greet(hello)
                if was_away:
                    log.info("the daemon is available again", extra=event("daemon_back"))
            with self._identity_lock:
                if self._hello is hello:
                    report = self._build_report()
                    break
        if report is not None:
            self._send(hello, report)
        self._send_unusable(hello)

    def _send_unusable(self, hello: AgentHello) -> None:
        """Sends the pending vote against an unusable generation, once. A refusal by the daemon is ignored, and the
        connection stays."""
        unusable, self._unusable = self._unusable, None
        if unusable is None:
            return
        try:
            self._take(self._client.vote(hello.agent, unusable))
        except (DaemonUnreachable, NotFound):
            self._unusable = self._unusable or unusable
            raise
        except REFUSED as error:
            log.debug("the daemon refused the vote against generation %d: %s", unusable.generation, error)

    def _build_report(self) -> AgentReport | None:
        """The next report; None when the source was garbage-collected: its final report is already queued."""
        held = [self._source()]
        try:
            return held[0].report() if held[0] is not None else None
        finally:
            release_unless_exiting(held)

    def _send(self, hello: AgentHello, report: AgentReport, final: bool = False) -> None:
        """Sends a report; on an error its content is queued again."""
        with self._lock:
            applied, self._applied = self._applied, None
        try:
            message = report.model_copy(update={"applied": applied, "finished": final})
            lease = self._client.report(hello.agent, message)
        except Exception as error:
            with self._identity_lock:
                if self._hello.agent == hello.agent:
                    self._requeue(report)
                    with self._lock:
                        self._applied = self._applied or applied
            if isinstance(error, NotFound):
                self.connected = False
            raise
        with self._identity_lock:
            if self._hello.agent == hello.agent:
                self._keep(report, time.monotonic())
        self._wanted_pause = lease.report_seconds
        self._take(lease.directive)

    def _requeue(self, report: AgentReport) -> None:
        """Gives a report that did not arrive back to its source."""
        held = [self._source()]
        if held[0] is not None:
            held[0].undelivered(report)
        release_unless_exiting(held)

    def _keep(self, report: AgentReport, now: float) -> None:
        """Stores a delivered report for RESEND_SECONDS."""
        self._delivered.append((now, report))
        with contextlib.suppress(IndexError):  # the other thread may have taken them all
            while self._delivered[0][0] < now - RESEND_SECONDS:
                self._delivered.popleft()

    def _requeue_recent(self) -> None:
        """Queues recently delivered reports again, because a killed daemon may have lost them. It ignores steps that it
        already has."""
        with self._identity_lock, contextlib.suppress(IndexError):
            while True:
                self._requeue(self._delivered.pop()[1])  # newest first, so that the oldest is sent first

    def _on_refusal(self, error: DaemonError | ConfigError) -> None:
        """Logs a failed exchange, once per outage, and marks the link as disconnected."""
        if isinstance(error, RankTaken):
            self._refusals.rank_taken(error)
        elif isinstance(error, NotAuthorized):
            self._refusals.token_refused(error)
        elif self.connected:
            log.warning(
                "daemon lost, training goes on with its last knobs: %s", error,
                extra=event("daemon_lost", reason=str(error)),
            )  # fmt: skip
        self.connected = False
        self._requeue_recent()

    # ---- listening

    def _listen_forever(self) -> None:
        """Waits for knobs of the daemon, and votes on proposals."""
        failures = 0
        while not self._stop.is_set():
            hello = self._greeted
            if not self.connected or hello is None or hello.agent != self._hello.agent:
                self._stop.wait(0.2)
                continue
            try:
                self._listen_once(hello.agent)
                failures = 0
            except REFUSED:
                # The report thread registers again.
                failures += 1
                self._requeue_recent()
                self._stop.wait(_backoff(failures))
            self._count("listen")
        self._listener_client.close()

    def _listen_once(self, agent: str) -> None:
        """One long poll, followed by votes on the proposals that it returns."""
        self._wait_for_turn()
        directive = self._listener_client.directive(agent, max(0, self._heard), self._voted, POLL_SECONDS)
        self._take(directive)
        while directive.proposed is not None and directive.proposed != self._voted:
            generation = directive.proposed
            self._wait_for_turn()
            directive = self._listener_client.vote(agent, self._vote(directive), POLL_SECONDS)
            self._voted = generation
            self._take(directive)

    def _wait_for_turn(self) -> None:
        """Waits until the rate limit allows the next poll or vote."""
        now = time.monotonic()
        if len(self._polls) == POLLS_AT_ONCE:
            self._stop.wait(self._polls[0] + POLLS_AT_ONCE / POLLS_PER_SECOND - now)
        self._polls.append(time.monotonic())

    def _vote(self, directive: Directive) -> Vote:
        """Checks proposed knobs. A check that raises an unexpected error votes no at once: without a vote the daemon
        would count a no after its deadline."""
        assert directive.proposed is not None
        held, reason = [self._source()], ""
        try:
            if held[0] is not None:
                held[0].check(Knobs().changed(directive.proposed_knobs or {}))
        except ConfigError as refusal:
            reason = str(refusal)
        except Exception as error:
            log.exception("knobs could not be checked", extra=event("check_failed", generation=directive.proposed))
            reason = f"The rank could not check these knobs ({type(error).__name__}: {error}); its log says more."
        finally:
            release_unless_exiting(held)
        return Vote(generation=directive.proposed, can=not reason, reason=reason)

    def _count(self, thread: str) -> None:
        """Updates the CPU seconds of the link, from the calling thread."""
        self._cpu[thread] = time.thread_time()
        self.cpu_seconds = sum(self._cpu.values())


def _is_same_process(hello: AgentHello, holder: Holder) -> bool:
    """Whether the process of the hello already holds the rank."""
    return holder.process is not None and (hello.process, hello.host) == (holder.process, holder.host)


def wait_for_goodbyes(seconds: float = LONGEST_GOODBYE_SECONDS) -> None:
    """Waits until all links of this process that are ending have said goodbye, for `seconds` at most."""
    latest = time.monotonic() + seconds
    for link in tuple(_open_links):
        link.close(max(0.0, latest - time.monotonic()))


def _pause(cpu_seconds: float, wanted: float | None = None) -> float:
    """Seconds until the next report, given the CPU seconds of the last one: the daemon's wish, if the allowed share
    permits it."""
    usual = min(LONGEST_REPORT_SECONDS, max(REPORT_SECONDS, cpu_seconds / REPORT_SHARE))
    return usual if wanted is None else min(usual, max(wanted, SHORTEST_REPORT_SECONDS, cpu_seconds / TRIAL_SHARE))


def _shortened(reason: str) -> str:
    """The reason as valid UTF-8 within the length limit of the message."""
    return reason.encode("utf-8", "replace").decode()[:LONGEST_REASON]


def _backoff(failures: int) -> float:
    """Seconds to wait before the next try: doubled each time, spread so that ranks do not come back all at once."""
    return _SPREAD.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))
