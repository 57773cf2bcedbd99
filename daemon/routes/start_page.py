"""/ and /docs: the start page and the API documentation, for a person who opens the daemon's address in a browser.

They need no token, because they contain no data of runs. The files of Swagger UI are in the package fastapi-offline, so
nothing is loaded from another host.
"""

from __future__ import annotations

import html
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from tidegate.daemon.problems import ProblemError
from tidegate.daemon.security.scopes import OPEN

router = APIRouter(include_in_schema=False, dependencies=[OPEN])
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_FILES: Final = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_PACKAGE: Final = "fastapi_offline"
_START: Final = """\
window.ui = SwaggerUIBundle({url: "/v1/openapi.json", dom_id: "#ui", deepLinking: true, validatorUrl: null});
"""
_DOCS: Final = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Tidegate: the daemon's API</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="ui"></div><script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body>
</html>
"""
_FRONT: Final = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Tidegate daemon</title><link rel="icon" href="data:,">
<style>body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }</style>
</head><body><h1>Tidegate daemon</h1>%s</body>
</html>
"""


@router.get("/")
async def front(request: Request) -> Response:
    """The start page with links: HTML for browsers, plain text for other clients."""
    base = str(request.base_url).rstrip("/")
    if "text/html" not in request.headers.get("accept", ""):
        text = "".join(f"{words}{f': {base}{path}' if path else ''}\n" for words, path in _lines(request))
        return PlainTextResponse(f"Tidegate daemon\n{text}", headers=_HEADERS)
    return HTMLResponse(_FRONT % "".join(_paragraph(words, path) for words, path in _lines(request)), headers=_HEADERS)


@router.get("/docs")
async def docs() -> Response:
    """Swagger UI of /v1/openapi.json."""
    return HTMLResponse(_DOCS, headers=_HEADERS)


@router.get("/v1/openapi.json")
async def description(request: Request) -> Response:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/docs/start.js")
async def start() -> Response:
    return Response(_START, media_type="text/javascript", headers=_HEADERS)


@router.get("/docs/swagger-ui-bundle.js")
@router.get("/docs/swagger-ui.css")
async def file(request: Request) -> Response:
    """A file of Swagger UI."""
    name = request.url.path.rpartition("/")[2]
    try:
        content = (resources.files(_PACKAGE) / "static" / name).read_bytes()
    except (ModuleNotFoundError, OSError) as error:
        detail = (
            "The files of Swagger UI are missing: pip install 'tidegate[daemon]'. /v1/openapi.json works without them."
        )
        raise ProblemError(503, "not-installed", detail) from error
    return Response(content, media_type=_FILES[name], headers={**_HEADERS, "Cache-Control": "max-age=3600"})


def _lines(request: Request) -> list[tuple[str, str]]:
    """The lines of the start page: pairs of a text and the path of its link; an empty path means no link."""
    metrics = [("Metrics of the daemon itself, for Prometheus", "/metrics")] if request.app.state.metrics else []
    return [
        ("It stores the knobs of training runs, and shows what the runs do.", ""),
        ("The runs as pages: `tidegate dashboard` serves the live view and prints its address.", ""),
        ("The runs on the command line: `tidegate status`; `tidegate --help` lists the rest.", ""),
        ("The API, to read and to try", "/docs"),
        ("The API for programs (OpenAPI)", "/v1/openapi.json"),
        ("Whether the daemon is ready", "/readyz"),
        *metrics,
        (
            "All data of runs needs a token: the daemon's first start wrote read.token and operate.token to its state "
            "directory; `tidegate token create` makes more tokens.",
            "",
        ),
    ]


def _paragraph(words: str, path: str) -> str:
    """The line in HTML: text between backquotes as code, the path as a link."""
    parts = html.escape(words).split("`")
    text = "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
    return f'<p>{text}: <a href="{path}">{path}</a></p>' if path else f"<p>{text}</p>"
