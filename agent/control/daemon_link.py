"""The agent's link to the daemon: reports every few seconds, listens for knobs. Training never waits for it."""

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

from tidegate.agent.control.process_identity import has_ended, is_seen
from tidegate.agent.control.refusal_log import Refusals
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
"""Share of one core that reports may take: the more one costs (large plans, a slow machine), the rarer they are,
between the two bounds. What operators wait for, knobs and votes, does not wait for a report; while a canary is judged,
the daemon may ask for more of them, within `TRIAL_SHARE`."""
TRIAL_SHARE = 1e-2
"""The same while a canary is judged, for some steps: with `REPORT_SHARE` harm would last twice as long."""
POLL_SECONDS = 20.0
TOLD_AGAIN_SECONDS = 3.0
"""The daemon writes what it is told once a second: the reports that arrived so long before the newest one are told
again when it was killed, however many they are."""
MAX_BACKOFF_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How long one exchange with the daemon may take, beside what a long poll waits for; and all of the first hello."""
MAX_ANSWER_BYTES = 1 << 20
"""A lease or a directive is a few hundred bytes."""
POLLS_AT_ONCE, POLLS_PER_SECOND = 20, 5.0
"""Polls and votes: a daemon that answers each one at once gets no more of them."""
LONGEST_GOODBYE_SECONDS = 10.0
REFUSED = (DaemonError, ConfigError)
"""What an exchange with the daemon raises; a ConfigError is a knob that it does not have."""
STRICT_PAUSE_SECONDS = 0.5
"""Between two questions for a rank that is held, where an attachment waits for it."""
STRICT_MARGIN_SECONDS = 1.0
"""How much longer than its lease one waits for an agent that may have ended."""
LONGEST_STRICT_SECONDS = 60.0
"""For how long one waits for it at most, whatever lease the daemon names."""
LONGEST_REASON = 2_000
"""Characters of why a generation cannot be used."""
SHORTEST_REPORT_SECONDS = 0.1
"""Between two reports, whatever the daemon asks for."""


@dataclass(frozen=True)
class Committed:
    """Knobs that all live ranks said yes to."""

    generation: int
    knobs: Knobs
    life: int = 0
    """How often a daemon has begun anew, whose generations count from 0 again."""

    @property
    def decision(self) -> tuple[int, int]:
        """Which one it is among all that this run was told."""
        return self.life, self.generation


class Speaker(Protocol):
    """Whose link it is. Calls come from the threads of the link."""

    def report(self) -> AgentReport:
        """What there is to tell since the last one."""

    def undelivered(self, report: AgentReport) -> None:
        """This one did not arrive."""

    def check(self, knobs: Knobs) -> None:
        """ConfigError when they cannot work here."""


@dataclass(frozen=True)
class _Farewell:
    """The last word of a link; its report is None where none could be made."""

    report: AgentReport | None


_open_links: set[AgentLink] = set()
"""Links whose threads have not said goodbye yet."""


class AgentLink:
    """Two threads: one reports, one listens. Both go on through any outage of the daemon, with back-off.

    They hold `speaker` only while they ask it, so that one that is dropped can be collected. `committed` is the newest
    decision; the training thread applies it. `leave` or `close` ends the threads.
    """

    def __init__(self, url: str, token: str | None, hello: AgentHello, speaker: Speaker) -> None:
        self.committed: Committed | None = None
        self.connected = False
        self.cpu_seconds = 0.0
        self._hello = hello
        self._greeted: AgentHello | None = None
        """What the daemon was told of us last."""
        self._speaker = weakref.ref(speaker)
        self._client, self._listener_client = (
            DaemonClient(url, token, ANSWER_SECONDS, max_answer_bytes=MAX_ANSWER_BYTES) for _ in range(2)
        )
        self._stop = threading.Event()
        self._box: SimpleQueue[_Farewell | None] = SimpleQueue()
        """Wakes the reporter. It may be filled while garbage is collected, when locks may be held."""
        self._lock = threading.Lock()
        self._life = threading.Lock()
        """Held while a report is made, or while the agent begins anew: a report is of one life."""
        self._heard = -1
        """The newest generation that the daemon has named as committed, usable or not."""
        self._voted: int | None = None
        self._applied: Applied | None = None
        self._unusable: Vote | None = None
        """About a generation that is committed and cannot be used; not told yet."""
        self._refused: set[tuple[int, int]] = set()
        """Decisions that were logged and told as unusable."""
        self._cpu: dict[str, float] = {}
        self._wanted_pause: float | None = None
        self._delivered: deque[tuple[float, AgentReport]] = deque()
        """Each with its time on the monotonic clock."""
        self._told = False
        """Whether it was logged that a report could not be made."""
        self.restarts = 0
        """How often a thread has failed and begun again."""
        self._polls: deque[float] = deque(maxlen=POLLS_AT_ONCE)
        """When the newest ones began, on the monotonic clock."""
        self._refusals = Refusals(hello.run, hello.rank)
        self._threads = [
            threading.Thread(target=self._go_on, args=(name, work), name=f"tidegate-link-{name}", daemon=True)
            for name, work in (("report", self._report_forever), ("listen", self._listen_forever))
        ]

    def start(self, strict: bool = False) -> None:
        """The first hello, then the threads. Whatever the daemon says, training begins and the link asks again.

        strict: RankTaken, once it is certain that the agent that holds the rank lives; NotAuthorized for a wrong token.
        """
        try:
            self._greet_first(strict)
        except BaseException:
            self._client.close()
            self._listener_client.close()
            raise
        _open_links.add(self)
        for thread in self._threads:
            thread.start()

    def applied(self, generation: int, step: int) -> None:
        """The training thread runs `generation` from `step` on; told to the daemon with the next report."""
        with self._lock:
            self._applied = Applied(generation=generation, step=step)
        self._box.put(None)

    def cannot(self, decision: tuple[int, int], reason: str) -> bool:
        """What was committed cannot be used here: told to the daemon with the next report. False when it was before."""
        if decision in self._refused:
            return False
        self._refused.add(decision)
        self._unusable = Vote(generation=decision[1], can=False, reason=_fitting(reason))
        self._box.put(None)
        return True

    def greet_as(self, hello: AgentHello) -> None:
        """The same agent is something else than it said: the daemon hears it before the next report."""
        self._hello = hello
        self._box.put(None)

    def begin_anew(self, hello: AgentHello, forget: Callable[[], None]) -> None:
        """The rank goes on from another step, as another agent, which has none of the steps from before: `forget` is
        called while no report is made."""
        with self._life:
            self._hello = hello.model_copy(update={"replaces": self._hello.agent})
            self._delivered.clear()
            with self._lock:
                self._applied = None
            forget()
        self._box.put(None)

    def leave(self, report: AgentReport | None) -> None:
        """This last report, then goodbye, as far as the daemon can be reached. Waits for nothing and takes no lock."""
        self._box.put(_Farewell(report))

    def close(self, seconds: float = LONGEST_GOODBYE_SECONDS) -> None:
        """Leaves, unless it has left, and waits until goodbye is said, for so many seconds at most."""
        if self._threads[0].is_alive():
            self._box.put(_Farewell(None))
            self._threads[0].join(timeout=seconds)

    # ---- saying hello

    def _greet_first(self, strict: bool) -> None:
        """A daemon that is away is no error. A rank that is held is waited for, where strict: its lease, for
        `LONGEST_STRICT_SECONDS` at most."""
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
                    self._refusals.taken(taken)
                elif is_seen(taken.holder) or now > latest:
                    raise
                else:
                    time.sleep(STRICT_PAUSE_SECONDS)
                    continue
            except NotAuthorized as error:
                if strict:
                    raise
                self._refusals.told(error)
            except REFUSED as error:
                log.warning("daemon away, training goes on: %s", error, extra=event("daemon_away", reason=str(error)))
            return

    def _greet(self, hello: AgentHello) -> None:
        """Says hello. The answer counts even where it is older: a daemon that lost its store begins anew from us."""
        known = self.committed
        said = hello
        if known is not None:
            # Start-up settings win once; what operators set since then goes on, even where the daemon forgot it.
            said = hello.model_copy(update={"reset_knobs": False, "knobs": known.knobs.as_dict()})
        directive = self._take_seat(said).directive
        with self._lock:
            life = known.life if known is not None else 0
            anew = known is not None and directive.committed < self._heard
            if anew or directive.committed >= self._heard:
                self._believe(directive, life + anew)
            self._voted = None
        self._greeted = hello
        self.connected = True
        self._refusals.over()

    def _take_seat(self, hello: AgentHello) -> Lease:
        """RankTaken while a process holds the rank that may be alive. One that has ended is replaced, and so is this
        one: an attachment of this process that is no more."""
        try:
            return self._client.hello(hello)
        except RankTaken as taken:
            holder = taken.holder
            if holder is None or not (_is_of(hello, holder) or has_ended(holder)):
                raise
            return self._client.hello(hello.model_copy(update={"replaces": holder.agent}))

    def _take(self, directive: Directive) -> None:
        with self._lock:
            if directive.committed > self._heard:
                self._believe(directive, self.committed.life if self.committed is not None else 0)

    def _believe(self, directive: Directive, life: int) -> None:
        """What was committed is what runs from now on, if it can be used; else what ran before stays. With the lock."""
        self._heard = directive.committed
        try:
            knobs = Knobs().changed(directive.committed_knobs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
            if not self.cannot((life, directive.committed), reason):
                return
            log.error(
                "generation %d cannot be used here, last good knobs stay: %s", directive.committed, reason,
                extra=event(
                    "generation_refused", run=self._hello.run, generation=directive.committed, reason=reason,
                ),
            )  # fmt: skip
        else:
            self.committed = Committed(directive.committed, knobs, life)

    # ---- both threads

    def _go_on(self, name: str, work: Callable[[], None]) -> None:
        """Does `work`, which begins again when it fails for a reason that nobody has thought of."""
        failures = 0
        while True:
            try:
                work()
                return
            except Exception:
                failures += 1
                self.restarts += 1
                log.exception(
                    "the link's thread %r failed, it begins again; training goes on", name,
                    extra=event("link_failed", run=self._hello.run, rank=self._hello.rank, thread=name),
                )  # fmt: skip
                if self._stop.wait(_backoff(failures)):
                    return

    # ---- reporting

    def _report_forever(self) -> None:
        failures, pause = 0, REPORT_SECONDS
        while True:
            farewell = self._rest(self._refusals.pause or (_backoff(failures) if failures else pause))
            if farewell is not None:
                self._say_goodbye(farewell)
                return
            began = time.thread_time()
            try:
                failures = 0 if self._deliver_or_tell() else failures + 1
            except REFUSED as error:
                failures += 1
                self._lost(error)
            pause = _pause(time.thread_time() - began, self._wanted_pause)
            self._count("report")

    def _rest(self, seconds: float) -> _Farewell | None:
        """So long, or until there is something to tell; the last word, once it is said."""
        with contextlib.suppress(Empty):
            found = self._box.get(timeout=seconds)
            while found is None:
                found = self._box.get_nowait()
            return found
        return None

    def _say_goodbye(self, farewell: _Farewell) -> None:
        self._stop.set()
        try:
            if self.connected and self._greeted is not None:
                with contextlib.suppress(*REFUSED):
                    if farewell.report is not None:
                        self._send(self._greeted, farewell.report, final=True)
                    self._client.goodbye(self._greeted.agent)
        finally:
            self._client.close()  # the listener hears the goodbye, and closes its own
            _open_links.discard(self)

    def _deliver_or_tell(self) -> bool:
        """Whether it went. Raises what `_send` does; what else fails is logged once, and hinders no later report."""
        try:
            self._deliver()
        except REFUSED:
            raise
        except Exception:
            if not self._told:
                log.exception("a report could not be made; training goes on", extra=event("report_failed"))
            self._told = True
            return False
        return True

    def _deliver(self) -> None:
        while True:
            hello = self._hello
            if not self.connected or self._greeted is not hello:
                was_away = not self.connected
                self._greet(hello)
                if was_away:
                    log.info("the daemon is there again", extra=event("daemon_back"))
            with self._life:
                if self._hello is hello:
                    report = self._made_report()
                    break
        if report is not None:
            self._send(hello, report)
        self._tell_unusable(hello)

    def _tell_unusable(self, hello: AgentHello) -> None:
        """Once: what the daemon makes of it is its own affair, and costs no connection."""
        unusable, self._unusable = self._unusable, None
        if unusable is None:
            return
        try:
            self._take(self._client.vote(hello.agent, unusable))
        except (DaemonUnreachable, NotFound):
            self._unusable = self._unusable or unusable
            raise
        except REFUSED as error:
            log.debug("the daemon did not take it that generation %d cannot be used: %s", unusable.generation, error)

    def _made_report(self) -> AgentReport | None:
        """None when the speaker was collected: its last word is on the way."""
        held = [self._speaker()]
        try:
            return held[0].report() if held[0] is not None else None
        finally:
            release_unless_exiting(held)

    def _send(self, hello: AgentHello, report: AgentReport, final: bool = False) -> None:
        with self._lock:
            applied, self._applied = self._applied, None
        try:
            told = report.model_copy(update={"applied": applied, "finished": final})
            lease = self._client.report(hello.agent, told)
        except Exception as error:
            with self._life:
                if self._hello.agent == hello.agent:
                    self._give_back(report)
                    with self._lock:
                        self._applied = self._applied or applied
            if isinstance(error, NotFound):
                self.connected = False
            raise
        with self._life:
            if self._hello.agent == hello.agent:
                self._keep(report, time.monotonic())
        self._wanted_pause = lease.report_seconds
        self._take(lease.directive)

    def _give_back(self, report: AgentReport) -> None:
        held = [self._speaker()]
        if held[0] is not None:
            held[0].undelivered(report)
        release_unless_exiting(held)

    def _keep(self, report: AgentReport, now: float) -> None:
        self._delivered.append((now, report))
        with contextlib.suppress(IndexError):  # the other thread may have taken them all
            while self._delivered[0][0] < now - TOLD_AGAIN_SECONDS:
                self._delivered.popleft()

    def _tell_again(self) -> None:
        """The daemon may have died with what it was told last. It knows what it has."""
        with self._life, contextlib.suppress(IndexError):
            while True:
                self._give_back(self._delivered.pop()[1])  # the oldest last, which is to come first

    def _lost(self, error: DaemonError | ConfigError) -> None:
        if isinstance(error, RankTaken):
            self._refusals.taken(error)
        elif isinstance(error, NotAuthorized):
            self._refusals.told(error)
        elif self.connected:
            log.warning(
                "daemon lost, training goes on with its last knobs: %s", error,
                extra=event("daemon_lost", reason=str(error)),
            )  # fmt: skip
        self.connected = False
        self._tell_again()

    # ---- listening

    def _listen_forever(self) -> None:
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
                # The reporter says hello again.
                failures += 1
                self._tell_again()
                self._stop.wait(_backoff(failures))
            self._count("listen")
        self._listener_client.close()

    def _listen_once(self, agent: str) -> None:
        self._wait_for_turn()
        directive = self._listener_client.directive(agent, max(0, self._heard), self._voted, POLL_SECONDS)
        self._take(directive)
        while directive.proposed is not None and directive.proposed != self._voted:
            asked = directive.proposed
            self._wait_for_turn()
            directive = self._listener_client.vote(agent, self._vote(directive), POLL_SECONDS)
            self._voted = asked
            self._take(directive)

    def _wait_for_turn(self) -> None:
        now = time.monotonic()
        if len(self._polls) == POLLS_AT_ONCE:
            self._stop.wait(self._polls[0] + POLLS_AT_ONCE / POLLS_PER_SECOND - now)
        self._polls.append(time.monotonic())

    def _vote(self, directive: Directive) -> Vote:
        """A check that fails for another reason than the knobs is a no, said at once: silence would be one later."""
        assert directive.proposed is not None
        held, reason = [self._speaker()], ""
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
        self._cpu[thread] = time.thread_time()
        self.cpu_seconds = sum(self._cpu.values())


def _is_of(hello: AgentHello, holder: Holder) -> bool:
    """Whether the process that says hello is the one that holds the rank."""
    return holder.process is not None and (hello.process, hello.host) == (holder.process, holder.host)


def wait_for_goodbyes(seconds: float = LONGEST_GOODBYE_SECONDS) -> None:
    """Until all links of this process that were left have said goodbye, for so many seconds at most."""
    latest = time.monotonic() + seconds
    for link in tuple(_open_links):
        link.close(max(0.0, latest - time.monotonic()))


def _pause(cpu_seconds: float, wanted: float | None = None) -> float:
    """Seconds until the next report after one that took so much CPU time: as the daemon wants, if the share allows."""
    usual = min(LONGEST_REPORT_SECONDS, max(REPORT_SECONDS, cpu_seconds / REPORT_SHARE))
    return usual if wanted is None else min(usual, max(wanted, SHORTEST_REPORT_SECONDS, cpu_seconds / TRIAL_SHARE))


def _fitting(reason: str) -> str:
    """The reason as a message of the wire takes it."""
    return reason.encode("utf-8", "replace").decode()[:LONGEST_REASON]


def _backoff(failures: int) -> float:
    """Seconds to wait before the next try: doubled each time, spread so that ranks do not come back all at once."""
    return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))
