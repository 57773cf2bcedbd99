"""HTTP requests to a daemon: its address, trust, the proof of its identity, deadlines, and errors."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpcore
from pydantic import BaseModel

from tidegate.client.answers import CompleteAnswer, error_of, parse, refuse_compressed
from tidegate.client.daemon_proof import FromState, is_proven
from tidegate.client.discovery import is_loopback
from tidegate.client.http_client import HTTP_ERRORS, Answer, HttpClient, system_trust
from tidegate.client.httpx_import import httpx
from tidegate.client.streams import within
from tidegate.errors import DaemonError, DaemonUnproven, DaemonUnreachable, NotAuthorized
from tidegate.terminal import visible

Query = Mapping[str, str | int | float | bool]
_NO_TRUST: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context used as a placeholder for plain http, which needs no certificates. It avoids loading the system's
certificates, which takes 30 ms."""

_T = TypeVar("_T")


class Transport:
    """HTTP requests to the daemon at `url`. Threads may share it. `DaemonClient` describes the arguments.

    Methods raise DaemonUnreachable for an exchange without a response. For a response with a status of 400 or more they
    raise the exception that `answers.error_of` makes of it.
    """

    def __init__(self, url: str, token: str | None, timeout: float, ca: Path | None, max_answer_bytes: int) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._max_answer_bytes = max_answer_bytes
        address = check_address(self.url)
        self._headers = {
            "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "tidegate", "Tidegate-Actor": actor(),
        }  # fmt: skip
        if token:
            if not (token.isascii() and token.isprintable() and " " not in token):
                raise NotAuthorized("The token has blanks or characters that no token has: copy it again.", 401)
            self._headers["Authorization"] = f"Bearer {token}"
        trust = _trust(ca) if address.scheme == "https" else _NO_TRUST
        direct = is_loopback(address.host)  # a proxy cannot reach our loopback
        state = next((given for given in (token, url) if isinstance(given, FromState)), None)
        check = functools.partial(self._check_proof, state) if token and state and address.scheme == "http" else None
        self._http = HttpClient(address, trust, direct, check)

    def close(self) -> None:
        self._http.close()

    def ask(self, kind: type[_T], method: str, path: str, **more: Any) -> _T:
        """Sends a request, and returns its response as a message of the type `kind`. more: arguments of `send`."""
        return parse(kind, self.send(method, path, **more))

    def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | str | None = None,
        query: Query | None = None,
        generation: int | None = None,
        wait: float = 0.0,
    ) -> CompleteAnswer:
        """Sends a request and returns its response. generation: value of If-Match. wait: seconds that the daemon may
        wait before it answers."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if generation is not None:
            headers["If-Match"] = f'"{generation}"'
        content = body.model_dump_json() if isinstance(body, BaseModel) else body
        where, seconds = f"{method} {path}", self.timeout + wait
        try:
            with within(seconds), self.opened(where, headers, content, query, seconds) as answer:
                return CompleteAnswer(answer.status, self._content(answer, where), where)
        except HTTP_ERRORS as error:
            raise self.unreachable(error) from error

    @contextlib.contextmanager
    def opened(
        self,
        where: str,
        headers: Mapping[str, str] | None = None,
        content: str | None = None,
        query: Query | None = None,
        seconds: float | None = None,
        read_seconds: float | None = None,
    ) -> Iterator[Answer]:
        """Context manager that sends a request and gives the response, whose body can be read in the block. Raises an
        exception (`answers.error_of`) for a status of 400 or more.

        where: method and path. seconds: time limit of each single read and write; None for the `timeout` of this
            object. read_seconds: another time limit of each read; None: `seconds`.
        """
        method, _, path = where.partition(" ")
        target = f"{path}?{_query_text(query)}" if query else path
        sent = content.encode("utf-8", "surrogatepass") if content is not None else None
        length = {"Content-Length": str(len(sent))} if sent is not None else {}
        with self._http.open(
            method, target, {**self._headers, **length, **(headers or {})}, sent,
            seconds=seconds or self.timeout, read_seconds=read_seconds,
        ) as answer:  # fmt: skip
            if answer.status >= 400:
                with within(self.timeout):
                    raise error_of(CompleteAnswer(answer.status, self._content(answer, where), where))
            yield answer

    def is_ready(self) -> bool:
        """Whether a daemon answers and is ready."""
        try:
            with within(self.timeout), self._http.open("GET", "/readyz", self._headers, seconds=self.timeout) as answer:
                return answer.status == 200
        except HTTP_ERRORS:
            return False

    def unreachable(self, error: Exception) -> DaemonUnreachable:
        """The exception for an exchange that ended without a response."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return DaemonUnreachable(
                f"TLS: the certificate of {self.url} is not trusted. If it should be, name its PEM file in "
                "TIDEGATE_CA_FILE."
            )
        if isinstance(error, httpcore.ConnectError):
            return DaemonUnreachable(
                f"No daemon answers at {self.url}. Start the first one with `tidegate daemon`. Start one that ran "
                "before with the port and the state directory that it had: in another directory it is empty."
            )
        why = (
            "no answer in time" if isinstance(error, httpcore.TimeoutException) else str(error) or type(error).__name__
        )
        return DaemonUnreachable(f"The daemon at {self.url} did not answer: {why}.")

    def _content(self, answer: Answer, where: str) -> bytes:
        refuse_compressed(answer, where)
        content = bytearray()
        for piece in answer.pieces():
            content += piece
            if len(content) > self._max_answer_bytes:
                raise DaemonError(
                    f"The answer to {where} has more than {self._max_answer_bytes:,} bytes, more than is "
                    f"accepted. Check that a Tidegate daemon answers at {self.url}.", 502,
                )  # fmt: skip
        return bytes(content)

    def _check_proof(self, state: FromState, stream: httpcore.NetworkStream) -> None:
        """Asks the server on a new connection for the proof that it is the daemon of the state directory `state.home`.
        DaemonUnproven if there is no right proof."""
        with within(self.timeout):
            proven = is_proven(stream, urlsplit(self.url).netloc.rpartition("@")[2], state.key)
        if not proven:
            raise DaemonUnproven(
                f"What answers at {self.url} does not prove to be the daemon of {state.home}: no token was sent. If it "
                f"is another program, end it, or start the daemon on another port. If it is a daemon of an earlier "
                "version, start it again with this one. If it has its state elsewhere, or is reached through a proxy "
                "or a tunnel, name it and its token yourself: TIDEGATE_DAEMON and TIDEGATE_OPERATE_TOKEN (or "
                "…_READ_TOKEN, …_AGENT_TOKEN), or a folder of copied token files in TIDEGATE_TOKEN_DIR."
            )


def check_address(url: str) -> httpx.URL:
    """Parses the address of a daemon; DaemonError if `url` is not a valid http or https address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return httpx.URL(url)
    except (httpx.InvalidURL, ValueError, AttributeError, TypeError):  # no text at all
        pass
    raise DaemonError(f"{visible(str(url))[:200]!r} is not an address of a daemon: give http://host:port.")


def _trust(ca: Path | None) -> ssl.SSLContext:
    """The TLS context for connections to the daemon. It trusts the certificates in the PEM file `ca`, else those in
    TIDEGATE_CA_FILE, else the system's certificate authorities."""
    given = ca or os.environ.get("TIDEGATE_CA_FILE")
    if not given:
        return system_trust()
    try:
        return ssl.create_default_context(cafile=given)
    except OSError as error:  # ssl.SSLError is one
        raise DaemonError(
            f"The certificates in {given} cannot be used: {error.strerror or error}. Give a PEM file that can be read."
        ) from error


def path_of(*parts: str | int) -> str:
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


def _query_text(query: Query) -> str:
    return urlencode({name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()})
