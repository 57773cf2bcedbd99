"""The agent's link to the daemon: reports every few seconds, listens for knobs. Training never waits for it."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.client import DaemonClient
from tidegate.errors import ConfigError, DaemonError, NotAuthorized, NotFound, RankTaken
from tidegate.knobs import Knobs
from tidegate.logs import event
from tidegate.wire.agent import AgentHello, AgentReport, Applied, Directive, Vote

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


class AgentLink:
    """Two threads: one reports, one listens. Both go on through any outage of the daemon, with back-off.

    `make_report()` gives the next report, `undelivered(report)` takes back one that did not arrive, `check(knobs)`
    raises when they cannot work here. `committed` is the newest decision; the training thread applies it.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        hello: AgentHello,
        *,
        make_report: Callable[[], AgentReport],
        undelivered: Callable[[AgentReport], None],
        check: Callable[[Knobs], None],
    ) -> None:
        self.committed: Committed | None = None
        self.connected = False
        self.cpu_seconds = 0.0
        self._hello, self._make_report, self._undelivered, self._check = hello, make_report, undelivered, check
        self._client = DaemonClient(url, token)
        self._listener_client = DaemonClient(url, token)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._voted: int | None = None
        self._applied: Applied | None = None
        self._cpu: dict[str, float] = {}
        self._wanted_pause: float | None = None
        self._delivered: deque[tuple[float, AgentReport]] = deque()
        """Each with its time on the monotonic clock."""
        self._told = False
        """Whether it was logged that a report could not be made."""
        self._register()
        self._threads = [
            threading.Thread(target=target, name=f"tidegate-link-{name}", daemon=True)
            for name, target in (("report", self._report_forever), ("listen", self._listen_forever))
        ]
        for thread in self._threads:
            thread.start()

    def applied(self, generation: int, step: int) -> None:
        """The training thread runs `generation` from `step` on; told to the daemon with the next report."""
        with self._lock:
            self._applied = Applied(generation=generation, step=step)
        self._wake.set()

    def greet_as(self, hello: AgentHello) -> None:
        """The same agent is something else than it said; of an outage the daemon hears it when it is back."""
        self._hello = hello
        with contextlib.suppress(DaemonError):
            self._greet()

    def close(self) -> None:
        """A last report and goodbye, as far as the daemon can be reached."""
        self._stop.set()
        self._wake.set()
        self._threads[0].join(timeout=10.0)
        try:
            if self.connected:
                with contextlib.suppress(DaemonError):
                    self._deliver_or_tell(final=True)
                    self._client.goodbye(self._hello.agent)
        finally:
            # The listener may sit in a long poll: its client is closed under it, and the thread is a daemon.
            self._listener_client.close()
            self._client.close()

    def _register(self) -> None:
        """The first hello. A daemon that is away is no error: training begins, the link retries. Others raise."""
        try:
            self._greet()
        except (RankTaken, NotAuthorized):
            self._client.close()
            self._listener_client.close()
            raise
        except DaemonError as error:
            log.warning("daemon away, training goes on: %s", error, extra=event("daemon_away", reason=str(error)))

    def _greet(self) -> None:
        """Says hello. The answer counts even where it is older: a daemon that lost its store begins anew from us."""
        hello = self._hello
        if self.committed is not None:
            # Start-up settings win once; what operators set since then goes on, even where the daemon forgot it.
            hello = hello.model_copy(update={"reset_knobs": False, "knobs": self.committed.knobs.as_dict()})
        directive = self._client.hello(hello).directive
        with self._lock:
            life = self.committed.life if self.committed is not None else 0
            anew = self.committed is not None and directive.committed < self.committed.generation
            self.committed, self._voted = _committed(directive, life + anew), None
        self.connected = True

    def _take(self, directive: Directive) -> None:
        with self._lock:
            if self.committed is None or directive.committed > self.committed.generation:
                life = self.committed.life if self.committed is not None else 0
                self.committed = _committed(directive, life)

    # ---- reporting

    def _report_forever(self) -> None:
        failures, pause = 0, REPORT_SECONDS
        while not self._stop.is_set():
            self._wake.wait(pause if not failures else _backoff(failures))
            self._wake.clear()
            if self._stop.is_set():
                return
            began = time.thread_time()
            try:
                failures = 0 if self._deliver_or_tell() else failures + 1
            except DaemonError as error:
                failures += 1
                self._lost(error)
            pause = _pause(time.thread_time() - began, self._wanted_pause)
            self._count("report")

    def _deliver_or_tell(self, final: bool = False) -> bool:
        """Whether it went. DaemonError as `_deliver`; what else fails is logged once, and hinders no later report."""
        try:
            self._deliver(final)
        except DaemonError:
            raise
        except Exception:
            if not self._told:
                log.exception("a report could not be made; training goes on", extra=event("report_failed"))
            self._told = True
            return False
        return True

    def _deliver(self, final: bool = False) -> None:
        if not self.connected:
            self._greet()
            log.info("the daemon is there again", extra=event("daemon_back"))
        report = self._make_report()
        with self._lock:
            applied, self._applied = self._applied, None
        try:
            told = report.model_copy(update={"applied": applied, "finished": final})
            lease = self._client.report(self._hello.agent, told)
        except Exception as error:
            self._undelivered(report)
            with self._lock:
                self._applied = self._applied or applied
            if isinstance(error, NotFound):
                self.connected = False
            raise
        self._keep(report, time.monotonic())
        self._wanted_pause = lease.report_seconds
        self._take(lease.directive)

    def _keep(self, report: AgentReport, now: float) -> None:
        self._delivered.append((now, report))
        with contextlib.suppress(IndexError):  # the other thread may have taken them all
            while self._delivered[0][0] < now - TOLD_AGAIN_SECONDS:
                self._delivered.popleft()

    def _tell_again(self) -> None:
        """The daemon may have died with what it was told last. It knows what it has."""
        with contextlib.suppress(IndexError):
            while True:
                self._undelivered(self._delivered.pop()[1])  # the oldest last, which is to come first

    def _lost(self, error: DaemonError) -> None:
        if self.connected:
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
            if not self.connected:
                self._stop.wait(0.2)
                continue
            try:
                self._listen_once()
                failures = 0
            except (DaemonError, RuntimeError):
                # The reporter says hello again; a closed client ends this thread through `_stop`.
                failures += 1
                self._tell_again()
                self._stop.wait(_backoff(failures))
            self._count("listen")

    def _listen_once(self) -> None:
        known = self.committed.generation if self.committed is not None else 0
        directive = self._listener_client.directive(self._hello.agent, known, self._voted, POLL_SECONDS)
        self._take(directive)
        while directive.proposed is not None and directive.proposed != self._voted:
            asked = directive.proposed
            directive = self._listener_client.vote(self._hello.agent, self._vote(directive), POLL_SECONDS)
            self._voted = asked
            self._take(directive)

    def _vote(self, directive: Directive) -> Vote:
        assert directive.proposed is not None
        try:
            self._check(Knobs().changed(directive.proposed_knobs or {}))
        except ConfigError as refusal:
            return Vote(generation=directive.proposed, can=False, reason=str(refusal))
        return Vote(generation=directive.proposed, can=True)

    def _count(self, thread: str) -> None:
        self._cpu[thread] = time.thread_time()
        self.cpu_seconds = sum(self._cpu.values())


def _committed(directive: Directive, life: int) -> Committed:
    return Committed(directive.committed, Knobs().changed(directive.committed_knobs), life)


def _pause(cpu_seconds: float, wanted: float | None = None) -> float:
    """Seconds until the next report after one that took so much CPU time: as the daemon wants, if the share allows."""
    usual = min(LONGEST_REPORT_SECONDS, max(REPORT_SECONDS, cpu_seconds / REPORT_SHARE))
    return usual if wanted is None else min(usual, max(wanted, cpu_seconds / TRIAL_SHARE))


def _backoff(failures: int) -> float:
    """Seconds to wait before the next try: doubled each time, spread so that ranks do not come back all at once."""
    return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))
