"""The HTTP client of the daemon, used by the command line, the agent and the dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpcore

from tidegate.client.answers import CompleteAnswer, event_lines, not_a_daemon, parse
from tidegate.client.http_client import HTTP_ERRORS
from tidegate.client.streams import within
from tidegate.client.transport import Query, Transport, path_of
from tidegate.errors import DaemonError, NotAuthorized, NotFound
from tidegate.knobs.knobs import KnobValue
from tidegate.wire.agent import AgentHello, AgentReport, Directive, Lease, Rates, RefusedAgents, Vote
from tidegate.wire.alert import AlertView
from tidegate.wire.audit import AuditRow
from tidegate.wire.canary import CanaryRequest, Rollback
from tidegate.wire.event import Event
from tidegate.wire.knobs import GenerationView, KnobPatch, KnobsView
from tidegate.wire.prediction import Advice, KnobPreview
from tidegate.wire.run import RunView, StepsView, TimelinesView
from tidegate.wire.timeline import TimelineView

MAX_BODY_BYTES: Final = 1 << 20
"""Largest request body that the daemon accepts."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Largest response body that a client accepts. The daemon limits its list of all runs to 48 MiB."""
QUIET_SECONDS: Final = 60.0
"""Longest time in seconds for which a client waits for data on an event stream, before it takes the connection to be
broken. The daemon sends a comment every 15 s."""

_NEW_IN_HELLO: Final = {"process", "replaces"}
"""Fields of AgentHello (the message that registers a rank) that older daemons with protocol 2 refuse. After a refusal
the message is sent again without them."""


class DaemonClient:
    """A client of the daemon at `url`. Threads may share it; `close()` it or use it as a context manager.

    token: bearer token; with None no token is sent (only health() works then). If the token or the url is a
        `FromState` (read from a state directory), each new connection over plain http begins with a proof that the
        server is the daemon of that directory; over https the certificate is the proof. DaemonUnproven if the proof
        fails; the token was not sent then.
    timeout: seconds for one exchange, from connecting to the end of the response; long polls add their waiting time.
    max_answer_bytes: largest response body; DaemonError for a larger one, and for a compressed one.
    ca: PEM file of the authority that signed the daemon's certificate (or the certificate itself); None:
        TIDEGATE_CA_FILE, else the system's certificate authorities.
    Methods may raise DaemonUnreachable, NotAuthorized, NotFound, StaleKnobs, RankTaken, KnobError or DaemonError.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 5.0,
        ca: Path | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = Transport(url, token, timeout, ca, max_answer_bytes)
        self._sends_evidence = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    # ---- agents

    def hello(self, message: AgentHello) -> Lease:
        """Registers an agent (Tidegate in the process of one rank). Returns for how long it counts as live without a
        report, and the knobs to use. RankTaken while another live agent holds the rank."""
        self._sends_evidence = True  # the daemon may be a newer one than at the last registration
        try:
            return self._transport.ask(Lease, "POST", path_of("agents"), body=message)
        except DaemonError as error:
            if error.status != 422 or message.process is None:
                raise
            # An older daemon refuses unknown fields. It frees a rank only when the lease has ended.
            return self._transport.ask(
                Lease, "POST", path_of("agents"), body=message.model_dump_json(exclude=_NEW_IN_HELLO)
            )

    def report(self, agent: str, message: AgentReport) -> Lease:
        """Sends a report, which renews the lease. NotFound: the daemon does not know this agent; call `hello` again."""
        path = path_of("agents", agent, "reports")
        if not self._sends_evidence:
            message = message.model_copy(update={"evidence": None})
        try:
            return self._transport.ask(Lease, "POST", path, body=_shrunk(message))
        except DaemonError as error:
            if error.status != 422 or message.evidence is None:
                raise
            # A daemon of the version before refuses the field `evidence`.
            self._sends_evidence = False
            return self.report(agent, message)

    def directive(self, agent: str, after_committed: int, after_proposed: int | None, wait: float) -> Directive:
        """Long poll for the daemon's directive: the agreed knobs that the rank must use, and proposed knobs on which it
        must vote, if there are any. Returns as soon as the agreed knobs have a newer generation than `after_committed`,
        or the proposed knobs a newer one than `after_proposed` (None: every proposal is new), or after `wait`
        seconds."""
        query: dict[str, str | int | float | bool] = {"committed": after_committed, "wait": wait}
        if after_proposed is not None:
            query["proposed"] = after_proposed
        return self._transport.ask(Directive, "GET", path_of("agents", agent, "directive"), query=query, wait=wait)

    def vote(self, agent: str, message: Vote, wait: float = 0.0) -> Directive:
        """Sends a vote on proposed knobs: whether the rank can apply them. Returns the daemon's directive as soon as
        the proposal is decided, or after `wait` seconds."""
        path = path_of("agents", agent, "votes")
        return self._transport.ask(Directive, "POST", path, body=message, query={"wait": wait}, wait=wait)

    def goodbye(self, agent: str, error: str = "") -> None:
        """Signs the agent off: its rank has finished, or failed by an exception of the type `error`."""
        self._transport.send("DELETE", path_of("agents", agent), query={"error": error} if error else {})

    # ---- operators

    def runs(self) -> list[RunView]:
        """All runs to which the token gives access, newest first."""
        return self._transport.ask(list[RunView], "GET", path_of("runs"))

    def refused_agents(self) -> list[RefusedAgents]:
        """Agents that the daemon refuses. Empty with a token for one run, and from a daemon of the version before."""
        try:
            return self._transport.ask(list[RefusedAgents], "GET", path_of("refused-agents"))
        except (NotAuthorized, NotFound):
            return []

    def run(self, run: str) -> RunView:
        return self._transport.ask(RunView, "GET", path_of("runs", run))

    def delete_run(self, run: str, reason: str = "") -> None:
        """Deletes a run that has ended, permanently."""
        self._transport.send("DELETE", path_of("runs", run), query={"reason": reason} if reason else None)

    def knobs(self, run: str) -> KnobsView:
        return self._transport.ask(KnobsView, "GET", path_of("runs", run, "knobs"))

    def preview_knobs(
        self, run: str, changes: Mapping[str, KnobValue], etag_generation: int | None = None
    ) -> KnobPreview:
        """The predicted effect of `changes`, without applying them (dry run).

        etag_generation: the generation that the changes are based on; None: the newest one, which is read first.
        """
        etag = self.knobs(run).generation if etag_generation is None else etag_generation
        body = KnobPatch(changes=dict(changes))
        return self._transport.ask(
            KnobPreview, "PATCH", path_of("runs", run, "knobs"), body=body, query={"dry_run": True}, generation=etag
        )

    def advice(self, run: str) -> Advice:
        """The changes of knobs that the simulator recommends, and the predicted seconds of an update with them. Pinned
        knobs may be among these knobs. The changes are not applied."""
        return self._transport.ask(Advice, "GET", path_of("runs", run, "advice"))

    def set_knobs(
        self,
        run: str,
        changes: Mapping[str, KnobValue],
        *,
        generation: int | None = None,
        reason: str = "",
        wait: float = 10.0,
        canary: CanaryRequest | None = None,
    ) -> GenerationView:
        """Makes a new generation with `changes`, and waits up to `wait` seconds for its outcome.

        generation: the newest generation that the caller has seen; StaleKnobs when there is a newer one. None: the
        newest one, which is read first. canary: the change is kept only if the next steps are not worse than the steps
        before.
        """
        etag = self.knobs(run).generation if generation is None else generation
        body = KnobPatch(changes=dict(changes), reason=reason, canary=canary)
        query = {"wait": wait}
        return self._transport.ask(
            GenerationView, "PATCH", path_of("runs", run, "knobs"), body=body, query=query, generation=etag, wait=wait
        )

    def roll_back(self, run: str, to: int | None = None, *, reason: str = "", wait: float = 10.0) -> GenerationView:
        """Restores the knobs of generation `to` as a new generation, and waits up to `wait` seconds for its outcome.

        `to` None: the generation before a running canary, else the newest one committed before the present generation.
        """
        body = Rollback(to=to, reason=reason)
        path = path_of("runs", run, "rollback")
        return self._transport.ask(GenerationView, "POST", path, body=body, query={"wait": wait}, wait=wait)

    def generations(self, run: str) -> list[GenerationView]:
        """All generations of the run, oldest first."""
        return self._transport.ask(list[GenerationView], "GET", path_of("runs", run, "generations"))

    def timelines(self, run: str, rank: int) -> TimelinesView:
        """The steps for which the daemon has a timeline of this rank."""
        return self._transport.ask(TimelinesView, "GET", path_of("runs", run, "ranks", rank, "timelines"))

    def timeline(self, run: str, rank: int, step: int | None = None) -> TimelineView | None:
        """The rank's newest timeline, or the timeline of `step`; None before the first one.

        NotFound when the timeline of `step` is no longer stored.
        """
        query: Query = {} if step is None else {"step": step}
        answer = self._transport.send("GET", path_of("runs", run, "ranks", rank, "timeline"), query=query)
        return None if answer.status == 204 else parse(TimelineView, answer)

    def rates(self, run: str, rank: int) -> Rates | None:
        """The rank's live rate card; None before the rank has measured any rate."""
        answer = self._transport.send("GET", path_of("runs", run, "ranks", rank, "rates"))
        return None if answer.status == 204 else parse(Rates, answer)

    def steps(self, run: str, rank: int, limit: int = 200) -> StepsView:
        return self._transport.ask(
            StepsView, "GET", path_of("runs", run, "ranks", rank, "steps"), query={"limit": limit}
        )

    def audit(self, run: str | None = None, limit: int = 500) -> list[AuditRow]:
        """The newest rows of the run's audit log (at most `limit`), oldest first. `run` None: rows of all runs, and
        rows that concern no run."""
        where = path_of("runs", run, "audit") if run is not None else path_of("audit")
        return self._transport.ask(list[AuditRow], "GET", where, query={"limit": limit})

    def alerts(self, run: str | None) -> list[AlertView]:
        """Alerts of the run: firing alerts, worst first, then resolved ones, newest first. `run` None: alerts that
        concern no run."""
        return self._transport.ask(list[AlertView], "GET", path_of("runs", run, "alerts") if run else path_of("alerts"))

    def firing(self) -> list[AlertView]:
        """All firing alerts, of any run or of no run: by severity, and the longest-firing first."""
        return self._transport.ask(list[AlertView], "GET", path_of("alerts"), query={"runs": "all", "state": "firing"})

    def events(self, run: str, last_event_id: int | None = None) -> Iterator[Event]:
        """The run's events as they occur, beginning with stored events after `last_event_id`. Ends when the daemon
        closes the stream.

        httpx-sse cannot read this stream: the client has no httpx response, and a line must have a largest length.
        """
        headers = {"Last-Event-ID": str(last_event_id)} if last_event_id is not None else {}
        where = f"GET {path_of('runs', run, 'events')}"
        try:
            with self._transport.opened(where, headers, read_seconds=QUIET_SECONDS) as answer:
                for line in event_lines(answer, where):
                    if line.startswith(b"data:"):
                        yield parse(Event, CompleteAnswer(200, line[5:], where))
        except httpcore.RemoteProtocolError:
            return
        except HTTP_ERRORS as error:
            raise self._transport.unreachable(error) from error

    def newest_event(self, run: str) -> int:
        """The id of the run's newest event; 0 when the run has no events."""
        where = f"GET {path_of('runs', run, 'events')}"
        try:
            with within(self._transport.timeout), self._transport.opened(where) as answer:
                newest = answer.headers.get("tidegate-newest-event", "")
                if not (newest.isascii() and newest.isdigit() and len(newest) < 20):
                    raise not_a_daemon(where)
                return int(newest)
        except HTTP_ERRORS as error:
            raise self._transport.unreachable(error) from error

    def health(self) -> bool:
        """Whether a daemon answers and is ready."""
        return self._transport.is_ready()


def _shrunk(report: AgentReport) -> str:
    """The report as JSON, at most MAX_BODY_BYTES if possible: first the timeline is left out, then older steps."""
    text = report.model_dump_json(exclude={"evidence"} if report.evidence is None else None)
    if len(text) <= MAX_BODY_BYTES:
        return text
    if report.timeline is not None:
        return _shrunk(report.model_copy(update={"timeline": None}))
    if len(report.steps) > 1:
        return _shrunk(report.model_copy(update={"steps": report.steps[-(len(report.steps) // 2) :]}))
    return text
