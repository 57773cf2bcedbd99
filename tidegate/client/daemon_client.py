"""The HTTP client of the daemon, used by the command line, the agent and the dashboard."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, cast, get_args
from urllib.parse import quote, urlencode, urlsplit

import httpcore
from pydantic import BaseModel, TypeAdapter, ValidationError

from tidegate.client.daemon_proof import FromState, is_proven
from tidegate.client.exchanges import HTTP_ERRORS, Answer, Exchanges, system_trust
from tidegate.client.state_files import home_of, read_no_link
from tidegate.client.streams import within
from tidegate.client.undrawn_httpx import httpx
from tidegate.errors import (
    ConfigError,
    DaemonError,
    DaemonUnproven,
    DaemonUnreachable,
    KnobError,
    NotAuthorized,
    NotFound,
    RankTaken,
    StaleKnobs,
)
from tidegate.knobs.knobs import KnobValue
from tidegate.terminal import encodable, visible
from tidegate.wire.agent import AgentHello, AgentReport, Directive, Holder, Lease, LeaseSeconds, Rates, Vote
from tidegate.wire.alert import AlertView
from tidegate.wire.audit import AuditRow
from tidegate.wire.canary import CanaryRequest, Rollback
from tidegate.wire.event import Event
from tidegate.wire.knobs import GenerationView, KnobPatch, KnobsView
from tidegate.wire.prediction import Advice, KnobPreview
from tidegate.wire.run import RunView, StepsView, TimelinesView
from tidegate.wire.timeline import TimelineView

Scope = Literal["read", "operate", "agent", "alert"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
DEFAULT_URL: Final = "http://127.0.0.1:8790"
MAX_BODY_BYTES: Final = 1 << 20
"""Largest request body that the daemon accepts."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Largest response body that a client accepts; enough for all runs of a daemon that stores as many as it can."""
MAX_EVENT_BYTES: Final = 1 << 20
"""Largest accepted line of an event stream."""
QUIET_SECONDS: Final = 60.0
"""Longest time without data on an event stream: the daemon sends a comment every 15 s."""
LONGEST_DETAIL: Final = 2_000
"""Most characters of an error message from the daemon that are shown."""

_NEW_IN_HELLO: Final = {"process", "replaces"}
"""Fields of AgentHello that older daemons with protocol 2 do not accept."""

_T = TypeVar("_T")
_Query = Mapping[str, str | int | float | bool]
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def state_dir() -> Path:
    """The state directory of this user's daemon: TIDEGATE_STATE_DIR, else XDG_STATE_HOME/tidegate, else the default."""
    if given := os.environ.get("TIDEGATE_STATE_DIR"):
        return _expanded(given)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return _expanded(base) / "tidegate"


def token_dir() -> Path:
    """The folder of the files `<scope>.token`: TIDEGATE_TOKEN_DIR (for example mounted secrets), else the folder of the
    daemon's state."""
    given = os.environ.get("TIDEGATE_TOKEN_DIR")
    return _expanded(given) if given else home_of(state_dir())


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path!r} names the home directory of an unknown user: give TIDEGATE_STATE_DIR a path without '~'."
        ) from error


def find_token(scope: Scope) -> str | None:
    """The token for `scope`: TIDEGATE_<SCOPE>_TOKEN, else TIDEGATE_TOKEN, else its file in `token_dir()`.

    A token from the state directory is a `FromState`: a client sends it only after the server has proved that it is the
    daemon of that directory. NotAuthorized for a token file that is not UTF-8; ConfigError for an invalid directory
    name.
    """
    for name in (f"TIDEGATE_{scope.upper()}_TOKEN", "TIDEGATE_TOKEN"):
        if given := os.environ.get(name, "").strip():
            return given
    names = ("read", "operate", "agent") if scope == "read" else (scope,)
    folder, mounted = token_dir(), bool(os.environ.get("TIDEGATE_TOKEN_DIR"))
    for name in names:
        path = folder / f"{name}.token"
        try:
            token = (path.read_text("utf-8") if mounted else read_no_link(path)[0]).strip()
        except OSError:
            continue
        except UnicodeDecodeError as error:
            raise NotAuthorized(
                f"{path} holds no token (byte {error.start} is not UTF-8): copy the daemon's file again.", 401
            ) from error
        if token:
            return token if mounted else FromState.of(token, folder)
    return None


def find_daemon() -> str:
    """The daemon's address: TIDEGATE_DAEMON, else the address that the local daemon wrote to daemon.json, else the
    default.

    An address from daemon.json is a `FromState`: no token is sent there before the server has proved to be that daemon.
    """
    if given := os.environ.get("TIDEGATE_DAEMON"):
        return encodable(given, "TIDEGATE_DAEMON")
    home = home_of(state_dir())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return FromState.of(str(json.loads(read_no_link(home / "daemon.json")[0])["url"]), home)
    return DEFAULT_URL


class DaemonClient:
    """A client of the daemon at `url`. Threads may share it; `close()` it or use it as a context manager.

    token: bearer token; with None no token is sent (only health() works then). If the token or the url is a
        `FromState`, each new connection over plain http begins with a proof that the server is the daemon of that state
        directory. (With https the certificate proves it.) DaemonUnproven if the proof fails; only a nonce was sent
        then.
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
        address = check_address(self.url)
        self._headers = {
            "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "tidegate", "Tidegate-Actor": actor(),
        }  # fmt: skip
        if token:
            if not (token.isascii() and token.isprintable() and " " not in token):
                raise NotAuthorized("The token has characters that no token has: copy it again.", 401)
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._max_answer_bytes = max_answer_bytes
        trust = _trust(ca) if address.scheme == "https" else _NO_TRUST
        direct = address.host in _LOOPBACK  # a proxy cannot reach our loopback
        state = next((given for given in (token, url) if isinstance(given, FromState)), None)
        check = functools.partial(self._check_proof, state) if token and state and address.scheme == "http" else None
        self._http = Exchanges(address, trust, direct, check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ---- agents

    def hello(self, message: AgentHello) -> Lease:
        """Registers one rank. RankTaken while another live agent holds it."""
        try:
            return self._ask(Lease, "POST", _at("agents"), body=message)
        except DaemonError as error:
            if error.status != 422 or message.process is None:
                raise
            # An older daemon refuses unknown fields. It frees a rank only when the lease has ended.
            return self._ask(Lease, "POST", _at("agents"), body=message.model_dump_json(exclude=_NEW_IN_HELLO))

    def report(self, agent: str, message: AgentReport) -> Lease:
        """Sends a report, which renews the lease. NotFound: the daemon does not know this agent; call `hello` again."""
        return self._ask(Lease, "POST", _at("agents", agent, "reports"), body=_shrunk(message))

    def directive(self, agent: str, after_committed: int, after_proposed: int | None, wait: float) -> Directive:
        """Long poll: the daemon's directive for this agent, as soon as it is newer than the given generations, or after
        `wait` seconds."""
        query: dict[str, str | int | float | bool] = {"committed": after_committed, "wait": wait}
        if after_proposed is not None:
            query["proposed"] = after_proposed
        return self._ask(Directive, "GET", _at("agents", agent, "directive"), query=query, wait=wait)

    def vote(self, agent: str, message: Vote, wait: float = 0.0) -> Directive:
        """Sends a vote on proposed knobs: whether the rank can apply them. Returns the daemon's directive as soon as
        the proposal is decided, or after `wait` seconds."""
        path = _at("agents", agent, "votes")
        return self._ask(Directive, "POST", path, body=message, query={"wait": wait}, wait=wait)

    def goodbye(self, agent: str) -> None:
        """Signs the agent off: its rank has finished."""
        self._send("DELETE", _at("agents", agent))

    # ---- operators

    def runs(self) -> list[RunView]:
        """All runs to which the token gives access, newest first."""
        return self._ask(list[RunView], "GET", _at("runs"))

    def run(self, run: str) -> RunView:
        return self._ask(RunView, "GET", _at("runs", run))

    def delete_run(self, run: str, reason: str = "") -> None:
        """Deletes a run that has ended, permanently."""
        self._send("DELETE", _at("runs", run), query={"reason": reason} if reason else None)

    def knobs(self, run: str) -> KnobsView:
        return self._ask(KnobsView, "GET", _at("runs", run, "knobs"))

    def preview_knobs(
        self, run: str, changes: Mapping[str, KnobValue], etag_generation: int | None = None
    ) -> KnobPreview:
        """The predicted effect of `changes`, without applying them (dry run).

        etag_generation: the generation that the changes are based on; None: the newest one, which is read first.
        """
        etag = self.knobs(run).generation if etag_generation is None else etag_generation
        body = KnobPatch(changes=dict(changes))
        return self._ask(
            KnobPreview, "PATCH", _at("runs", run, "knobs"), body=body, query={"dry_run": True}, generation=etag
        )

    def advice(self, run: str) -> Advice:
        """Recommended knobs for the run, according to the simulator, including pinned knobs."""
        return self._ask(Advice, "GET", _at("runs", run, "advice"))

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
        return self._ask(
            GenerationView, "PATCH", _at("runs", run, "knobs"), body=body, query=query, generation=etag, wait=wait
        )

    def roll_back(self, run: str, to: int | None = None, *, reason: str = "", wait: float = 10.0) -> GenerationView:
        """Restores the knobs of generation `to` as a new generation. None: the generation before the newest, or the
        base of a running canary."""
        body = Rollback(to=to, reason=reason)
        path = _at("runs", run, "rollback")
        return self._ask(GenerationView, "POST", path, body=body, query={"wait": wait}, wait=wait)

    def generations(self, run: str) -> list[GenerationView]:
        """All generations of the run, oldest first."""
        return self._ask(list[GenerationView], "GET", _at("runs", run, "generations"))

    def timelines(self, run: str, rank: int) -> TimelinesView:
        """The steps for which the daemon has a timeline of this rank."""
        return self._ask(TimelinesView, "GET", _at("runs", run, "ranks", rank, "timelines"))

    def timeline(self, run: str, rank: int, step: int | None = None) -> TimelineView | None:
        """The rank's newest timeline, or the timeline of `step`; None before the first one.

        NotFound when the timeline of `step` is no longer stored.
        """
        query: _Query = {} if step is None else {"step": step}
        answer = self._send("GET", _at("runs", run, "ranks", rank, "timeline"), query=query)
        return None if answer.status == 204 else _parse(TimelineView, answer)

    def rates(self, run: str, rank: int) -> Rates | None:
        """The rank's live rate card; None before the rank has measured any rate."""
        answer = self._send("GET", _at("runs", run, "ranks", rank, "rates"))
        return None if answer.status == 204 else _parse(Rates, answer)

    def steps(self, run: str, rank: int, limit: int = 200) -> StepsView:
        return self._ask(StepsView, "GET", _at("runs", run, "ranks", rank, "steps"), query={"limit": limit})

    def audit(self, run: str | None = None, limit: int = 500) -> list[AuditRow]:
        """The newest rows of the run's audit log, oldest first. None: rows of all runs, and rows that concern no
        run."""
        where = _at("runs", run, "audit") if run is not None else _at("audit")
        return self._ask(list[AuditRow], "GET", where, query={"limit": limit})

    def alerts(self, run: str | None) -> list[AlertView]:
        """Alerts of the run: firing alerts, worst first, then resolved ones, newest first. None: alerts that concern no
        run."""
        return self._ask(list[AlertView], "GET", _at("runs", run, "alerts") if run else _at("alerts"))

    def firing(self) -> list[AlertView]:
        """All firing alerts, of any run or of no run: by severity, and the longest-firing first."""
        return self._ask(list[AlertView], "GET", _at("alerts"), query={"runs": "all", "state": "firing"})

    def events(self, run: str, last_event_id: int | None = None) -> Iterator[Event]:
        """The run's events as they occur, beginning with stored events after `last_event_id`. Ends when the daemon
        closes the stream."""
        headers = {"Last-Event-ID": str(last_event_id)} if last_event_id is not None else {}
        where = f"GET {_at('runs', run, 'events')}"
        try:
            with self._opened(where, headers, read_seconds=QUIET_SECONDS) as answer:
                for line in _lines(answer, where):
                    if line.startswith(b"data:"):
                        yield _parse(Event, _Answer(200, line[5:], where))
        except httpcore.RemoteProtocolError:
            return
        except HTTP_ERRORS as error:
            raise self._unreachable(error) from error

    def newest_event(self, run: str) -> int:
        """The id of the run's newest event; 0 when the run has no events."""
        where = f"GET {_at('runs', run, 'events')}"
        try:
            with within(self._timeout), self._opened(where) as answer:
                newest = answer.headers.get("tidegate-newest-event", "")
                if not (newest.isascii() and newest.isdigit() and len(newest) < 20):
                    raise _not_a_daemon(where)
                return int(newest)
        except HTTP_ERRORS as error:
            raise self._unreachable(error) from error

    def health(self) -> bool:
        """Whether a daemon answers and is ready."""
        try:
            with (
                within(self._timeout),
                self._http.open("GET", "/readyz", self._headers, seconds=self._timeout) as answer,
            ):
                return answer.status == 200
        except HTTP_ERRORS:
            return False

    # ---- transport

    def _check_proof(self, state: FromState, stream: httpcore.NetworkStream) -> None:
        """DaemonUnproven unless the server at the other end is the daemon of `state`'s directory."""
        with within(self._timeout):
            proven = is_proven(stream, urlsplit(self.url).netloc.rpartition("@")[2], state.key)
        if not proven:
            raise DaemonUnproven(
                f"What answers at {self.url} does not prove to be the daemon of {state.home}: no token was sent. If it "
                f"is another program, end it, or start the daemon on another port. If it is a daemon of an earlier "
                "version, start it again with this one. If it has its state elsewhere, or is reached through a proxy "
                "or a tunnel, name it and its token yourself: TIDEGATE_DAEMON and TIDEGATE_OPERATE_TOKEN (or "
                "…_READ_TOKEN, …_AGENT_TOKEN), or a folder of copied token files in TIDEGATE_TOKEN_DIR."
            )

    def _ask(self, kind: type[_T], method: str, path: str, **more: Any) -> _T:
        return _parse(kind, self._send(method, path, **more))

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | str | None = None,
        query: _Query | None = None,
        generation: int | None = None,
        wait: float = 0.0,
    ) -> _Answer:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if generation is not None:
            headers["If-Match"] = f'"{generation}"'
        content = body.model_dump_json() if isinstance(body, BaseModel) else body
        where, seconds = f"{method} {path}", self._timeout + wait
        try:
            with within(seconds), self._opened(where, headers, content, query, seconds) as answer:
                return _Answer(answer.status, self._content(answer, where), where)
        except HTTP_ERRORS as error:
            raise self._unreachable(error) from error

    @contextlib.contextmanager
    def _opened(
        self,
        where: str,
        headers: Mapping[str, str] | None = None,
        content: str | None = None,
        query: _Query | None = None,
        seconds: float | None = None,
        read_seconds: float | None = None,
    ) -> Iterator[Answer]:
        """Sends a request and gives the response, whose body can be read in the block; raises the error for a status of
        400 or more.

        where: method and path. seconds: limit of each single read and write; None for `timeout`. read_seconds: limit of
            each read, if different.
        """
        method, _, path = where.partition(" ")
        target = f"{path}?{_query_text(query)}" if query else path
        sent = content.encode("utf-8", "surrogatepass") if content is not None else None
        length = {"Content-Length": str(len(sent))} if sent is not None else {}
        with self._http.open(
            method, target, {**self._headers, **length, **(headers or {})}, sent,
            seconds=seconds or self._timeout, read_seconds=read_seconds,
        ) as answer:  # fmt: skip
            if answer.status >= 400:
                with within(self._timeout):
                    raise _error(_Answer(answer.status, self._content(answer, where), where))
            yield answer

    def _content(self, answer: Answer, where: str) -> bytes:
        _refuse_compressed(answer, where)
        content = bytearray()
        for piece in answer.pieces():
            content += piece
            if len(content) > self._max_answer_bytes:
                raise DaemonError(
                    f"The answer to {where} has more than {self._max_answer_bytes:,} bytes: what answers at "
                    f"{self.url} is not a Tidegate daemon, or its answer is too large.", 502,
                )  # fmt: skip
        return bytes(content)

    def _unreachable(self, error: Exception) -> DaemonUnreachable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return DaemonUnreachable(
                f"TLS: the certificate of {self.url} is not trusted. If it should be, name its PEM file in "
                "TIDEGATE_CA_FILE."
            )
        if isinstance(error, httpcore.ConnectError):
            return DaemonUnreachable(f"No daemon answers at {self.url}. Start one with `tidegate daemon`.")
        why = (
            "no answer in time" if isinstance(error, httpcore.TimeoutException) else str(error) or type(error).__name__
        )
        return DaemonUnreachable(f"The daemon at {self.url} did not answer: {why}.")


_NO_TRUST: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Placeholder for plain http, which uses no certificates: loading the system's certificates takes 30 ms."""


def check_address(url: str) -> httpx.URL:
    """Parses the address of a daemon; DaemonError if `url` is not a valid http or https address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return httpx.URL(url)
    except (httpx.InvalidURL, ValueError, AttributeError, TypeError):  # no text at all
        pass
    raise DaemonError(f"{visible(str(url))[:200]!r} is not an address of a daemon: say http://host:port.")


def _trust(ca: Path | None) -> ssl.SSLContext:
    """The TLS context: the certificate authorities that are trusted for the daemon."""
    given = ca or os.environ.get("TIDEGATE_CA_FILE")
    if not given:
        return system_trust()
    try:
        return ssl.create_default_context(cafile=given)
    except OSError as error:  # ssl.SSLError is one
        raise DaemonError(f"The certificates in {given} cannot be used: {error.strerror or error}.") from error


def _at(*parts: str | int) -> str:
    """The URL path of a resource. Each part is quoted, so that it stays one segment of the path."""
    return "/".join(("/v1", *(quote(str(part), safe="") for part in parts)))


def actor() -> str:
    """The name of the caller for the audit log, `user@host`; it is not verified."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid())
    who = f"{user}@{socket.gethostname()}"
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in who)[:48]


def _shrunk(report: AgentReport) -> str:
    """The report as JSON, at most MAX_BODY_BYTES if possible: first the timeline is left out, then older steps."""
    text = report.model_dump_json()
    if len(text) <= MAX_BODY_BYTES:
        return text
    if report.timeline is not None:
        return _shrunk(report.model_copy(update={"timeline": None}))
    if len(report.steps) > 1:
        return _shrunk(report.model_copy(update={"steps": report.steps[-(len(report.steps) // 2) :]}))
    return text


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """A cached TypeAdapter, because building one takes longer than using it."""
    return TypeAdapter(kind)


@dataclass(frozen=True)
class _Answer:
    """A complete response of the daemon; `where` names its request."""

    status: int
    content: bytes
    where: str


def _query_text(query: _Query) -> str:
    return urlencode({name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()})


def _refuse_compressed(answer: Answer, where: str) -> None:
    """DaemonError for a compressed response: no compression was requested, and the decompressed size has no bound."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise DaemonError(
            f"The answer to {where} is compressed ({encoding[:20]!r}), which was not asked for: no Tidegate "
            "daemon does that, and a proxy in front of one must not.", 502,
        )  # fmt: skip


def _lines(answer: Answer, where: str) -> Iterator[bytes]:
    """The lines of a stream, as they arrive. DaemonError for a line of more than MAX_EVENT_BYTES."""
    _refuse_compressed(answer, where)
    rest = b""
    for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_EVENT_BYTES:
            raise DaemonError(f"A line of {where} has more than {MAX_EVENT_BYTES:,} bytes.", 502)


def _parse(kind: type[_T], answer: _Answer) -> _T:
    try:
        parsed: _T = _adapter(cast("Any", kind)).validate_json(answer.content)
        return parsed
    except ValidationError as error:
        raise _not_a_daemon(answer.where) from error


def _not_a_daemon(where: str) -> DaemonError:
    return DaemonError(f"What answers {where} is not a Tidegate daemon of this version.", 502)


def _error(answer: _Answer) -> DaemonError | KnobError:
    """The exception for an error response (problem details)."""
    try:
        problem = dict(_adapter(dict[str, Any]).validate_json(answer.content))
    except ValidationError:
        problem = {"detail": f"The daemon answered {answer.status} without saying why."}
    detail = visible(str(problem.get("detail") or problem.get("title") or "")[:LONGEST_DETAIL])
    kind = problem.get("type")
    if kind == "invalid-knob":
        return KnobError(detail, visible(str(problem.get("knob", ""))[:LONGEST_DETAIL]))
    if kind == "rank-taken":
        return _rank_taken(detail, problem)
    by_status = {401: NotAuthorized, 403: NotAuthorized, 404: NotFound, 412: StaleKnobs}
    return by_status.get(answer.status, DaemonError)(detail, answer.status)


def _rank_taken(detail: str, problem: dict[str, Any]) -> RankTaken:
    try:
        holder = Holder.model_validate(problem["holder"])
        return RankTaken(detail, 409, holder, _adapter(LeaseSeconds).validate_python(problem["lease_seconds"]))
    except (KeyError, ValidationError):  # an older daemon does not name the holder
        return RankTaken(detail)
