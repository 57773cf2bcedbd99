"""Error responses of the daemon in the problem format of RFC 9457, and the handlers that map exceptions to them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from tidegate.daemon.storage.database_file import why_unusable
from tidegate.daemon.storage.engines import is_busy

RETRY_SECONDS = "1"
"""Value of the header Retry-After in responses with status 503."""
TITLES = {
    400: "Bad request",
    401: "Not authorized",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    412: "Precondition failed",
    413: "Too large",
    422: "Invalid",
    428: "Precondition required",
    429: "Too many requests",
    431: "Headers too large",
    500: "Internal error",
    503: "Not ready",
}


class ProblemError(Exception):
    """Ends a request with a problem response; `more` are extension members of the problem."""

    def __init__(self, status: int, type: str, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.type = type
        self.detail = detail
        self.more = more


class _ProblemResponse(JSONResponse):
    """JSON response that can always be encoded: characters that UTF-8 cannot encode become question marks."""

    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def problem(status: int, type: str, detail: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """The response for one problem; `more` are extension members of the problem."""
    body = {"type": type, "title": TITLES.get(status, "Error"), "status": status, "detail": detail, **more}
    return _ProblemResponse(body, status, headers=headers)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Value of a route's argument `responses`: the status codes of problems that this route can answer in addition to
    the problems of every route."""
    return {status: {"description": TITLES[status]} for status in statuses}


def install(app: FastAPI) -> None:
    """Installs exception handlers, so that `app` answers every error with a problem."""
    for kind in (Exception, ProblemError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(SQLAlchemyError, _on_database)


def _allowed(request: Request) -> str:
    """Value of the header Allow: methods of all routes at this path. Starlette gives those of the first route only."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


async def _on_database(request: Request, error: Exception) -> Response:
    """Answers with status 503 if the database is locked or cannot be used for now. Raises other database errors again:
    they become responses with status 500."""
    if isinstance(error, OperationalError) and is_busy(error):
        detail = "Another process holds the write lock of the daemon's database: nothing was changed, try again."
        return problem(503, "store-busy", detail, {"Retry-After": RETRY_SECONDS})
    if (why := why_unusable(error)) is None:
        raise error
    return problem(503, "store-unusable", f"{why} Nothing was changed.", {"Retry-After": RETRY_SECONDS})


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ProblemError():
            headers = {"Retry-After": RETRY_SECONDS} if error.status == 503 else None
            return problem(error.status, error.type, error.detail, headers, **error.more)
        case RequestValidationError():
            found = [{"at": ".".join(str(part) for part in e["loc"]), "message": e["msg"]} for e in error.errors()]
            shown = "; ".join(f"{e['at']}: {e['message']}" for e in found[:3])
            return problem(422, "invalid-message", f"The message is not valid: {shown}.", errors=found[:20])
        case HTTPException(status_code=404):
            return problem(404, "not-found", f"There is nothing at {request.url.path}.")
        case HTTPException(status_code=405):
            detail = f"{request.url.path} does not accept {request.method}."
            return problem(405, "method-not-allowed", detail, headers={"Allow": _allowed(request)})
        case HTTPException():
            return problem(error.status_code, "about:blank", str(error.detail))
    detail = f"{request.method} {request.url.path} failed with {type(error).__name__}; the daemon's log says more."
    # The server closes the connection after this response. A client must know, or it sends its next request on it.
    return problem(500, "internal", detail, headers={"Connection": "close"})
