"""Complete responses of the daemon: reads them as messages, and turns error responses into exceptions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from tidegate.client.http_client import Answer
from tidegate.errors import DaemonError, KnobError, NotAuthorized, NotFound, RankTaken, StaleKnobs
from tidegate.terminal import visible
from tidegate.wire.agent import Holder, LeaseSeconds

MAX_EVENT_BYTES: Final = 1 << 20
"""Largest accepted line of an event stream."""
LONGEST_DETAIL: Final = 2_000
"""Number of characters of the daemon's error message that are shown, at most."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class CompleteAnswer:
    """A complete response of the daemon. `content`: the body; `where`: method and path of the request, for messages."""

    status: int
    content: bytes
    where: str


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The pydantic TypeAdapter for `kind`, from a cache: to build one takes longer than to use it."""
    return TypeAdapter(kind)


def refuse_compressed(answer: Answer, where: str) -> None:
    """Raises DaemonError if the response is compressed. The client never requests compression, and the size after
    decompression has no bound. where: method and path of the request, for the message."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise DaemonError(
            f"The answer to {where} is compressed ({encoding[:20]!r}), although no compression was requested: the "
            "server is not a Tidegate daemon, or a proxy in front of it must be set to not compress.", 502,
        )  # fmt: skip


def event_lines(answer: Answer, where: str) -> Iterator[bytes]:
    """The lines of a stream, as they arrive. DaemonError for a line of more than MAX_EVENT_BYTES."""
    refuse_compressed(answer, where)
    rest = b""
    for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_EVENT_BYTES:
            raise DaemonError(
                f"A line of the answer to {where} has over {MAX_EVENT_BYTES:,} bytes, more than a Tidegate "
                "daemon sends: check the address.", 502,
            )  # fmt: skip


def parse(kind: type[_T], answer: CompleteAnswer) -> _T:
    """Parses the body of a response as a message of the type `kind`. DaemonError if the body is no such message. Fields
    that only a newer daemon knows are left out."""
    try:
        parsed: _T = _adapter(cast("Any", kind)).validate_json(answer.content, extra="ignore")
        return parsed
    except ValidationError as error:
        raise not_a_daemon(answer.where) from error


def not_a_daemon(where: str) -> DaemonError:
    return DaemonError(f"What answers {where} is not a Tidegate daemon of this version.", 502)


def error_of(answer: CompleteAnswer) -> DaemonError | KnobError:
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
