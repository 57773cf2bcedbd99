"""Sign-in to the live view: with a link that has a one-time code, or with a token pasted into the sign-in page.

Both give the browser a session. A browser without a session gets the sign-in page only, unless the live view is public.
"""

from __future__ import annotations

import hmac
import html
import os
import threading
from typing import Final
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import find_daemon, find_token
from tidegate.dashboard import OPEN_PATH, SIGN_IN_PATH, URL_VARIABLE
from tidegate.dashboard.session import browser_sessions, one_time_codes
from tidegate.errors import DaemonError, DaemonUnreachable, KnobError, NotAuthorized

LONGEST_FORM: Final = 8_192
"""Largest form that the sign-in page may send, in bytes."""
CHECK_SECONDS: Final = 3.0
CHECKS: Final = 4
"""Largest number of tokens that are checked with the daemon at the same time."""
STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 12vh auto 0; padding: 0 1.5rem;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; } p { margin: .3rem 0; }
code { font: .9em ui-monospace, monospace; background: #8882; border-radius: 3px; padding: .1em .3em;
  white-space: nowrap; }
.said { border-left: 4px solid #d55e00; padding: .2rem .7rem; margin: .8rem 0; }
form { display: flex; gap: .5rem; margin-top: .6rem; }
input, button { font: inherit; padding: .4rem .7rem; border: 1px solid #8888; border-radius: 6px; color: inherit; }
input { flex: 1; min-width: 0; background: transparent; } button { background: #0072b2; color: #fff; cursor: pointer; }
small { opacity: .75; }
@media (prefers-color-scheme: dark) { body { color: #fafafa; background: #171614; } }
"""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",  # `no-referrer` would take the Origin from the form, too
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
}
_USED: Final = "This link was used before, or is older than 10 minutes."
_checks = threading.BoundedSemaphore(CHECKS)


async def enter(request: Request) -> Response:
    """Exchanges the one-time code for a session, and redirects to the first page, whose address has no code."""
    if request.method != "GET":
        return Response(headers=_HEADERS)  # link previewers send HEAD: they must not use up the code
    if _is_prefetch(request):
        return Response(status_code=425, headers=_HEADERS)  # the browser asks again when the user opens the link
    if not one_time_codes.redeem(request.query_params.get("code", "")):
        return page("/", _USED)
    return _let_in(request, find_token("operate") or "", "/")


def _is_prefetch(request: Request) -> bool:
    """Whether a browser fetches this page before the user has opened the link. Sec-Purpose can have parameters, as in
    `prefetch;prerender`."""
    purposes = [request.headers.get(name, "") for name in ("sec-purpose", "purpose")]
    return any(text.partition(";")[0].strip().lower() == "prefetch" for text in purposes)


async def sign_in(request: Request) -> Response:
    """Exchanges a token for a session, and redirects to the page that the browser requested."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_FORM:
            return page("/", f"That is no token: it has more than {LONGEST_FORM} bytes.", 413)
    fields = parse_qs(bytes(body).decode("utf-8", "replace"))
    given, then = (fields.get(name, [""])[0].strip() for name in ("token", "then"))
    then = then if _is_ours(then) else "/"
    if not given:
        return page(then, "Paste a token first.")
    operate, problem = await run_in_threadpool(_check, given)
    return page(then, problem) if problem else _let_in(request, operate, then)


ROUTES: Final = [Route(OPEN_PATH, enter, methods=["GET"]), Route(SIGN_IN_PATH, sign_in, methods=["POST"])]


def page(then: str, said: str = "", status: int = 403) -> Response:
    """The sign-in page. then: the address to open after the sign-in. said: the reason why the sign-in failed."""
    reason = f'<p class="said">{html.escape(said)}</p>' if said else ""
    body = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Tidegate</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{STYLE}</style>
<h1>Tidegate live view</h1><p>This browser is not signed in.</p>{reason}
<h2>With a link</h2>
<p>Where the live view runs, as the user who started it: <code>tidegate dashboard --link</code> (and its
<code>--port</code>) prints a link that opens once, within 10 minutes.</p>
<h2>With a token</h2>
<p>The read token lets you look, the operate token also turn knobs. The daemon writes them to <code>read.token</code>
and <code>operate.token</code> in its state directory.</p>
<form method="post" action="{SIGN_IN_PATH}"><input type="hidden" name="then" value="{html.escape(then)}">
<input type="password" name="token" aria-label="Token" placeholder="Token" autocomplete="off" required autofocus>
<button>Enter</button></form>
<p><small>A session ends after {browser_sessions.LIFE_SECONDS / 3600:.0f} hours, or with the live view.</small></p>
</html>"""
    return HTMLResponse(body, status, headers=_HEADERS)


def wanted(connection: HTTPConnection) -> str:
    """The path and query of this request, for the redirect after the sign-in."""
    url = connection.url
    address = f"{url.path}?{url.query}" if url.query else url.path
    return address if _is_ours(address) else "/"


def _is_ours(address: str) -> bool:
    """Whether a redirect to the address stays on this host."""
    return address.startswith("/") and not address.startswith("//") and not {"\\", "\r", "\n", "\t"} & {*address}


def _let_in(request: Request, operate: str, then: str) -> Response:
    """A redirect to `then` that gives the browser a session. `operate`: the operate token, empty for read-only."""
    answer = RedirectResponse(then, 303, headers=_HEADERS)
    # SameSite=Lax: the redirect page is a local file, and links to runs on other sites must work.
    answer.set_cookie(
        browser_sessions.cookie_name(request.headers.get("host", "")), browser_sessions.begin(operate),
        httponly=True, samesite="lax", secure=request.url.scheme == "https", max_age=int(browser_sessions.LIFE_SECONDS),
    )  # fmt: skip
    return answer


def _check(token: str) -> tuple[str, str]:
    """The token if it has the operate scope, else empty; and the problem with the token, empty if there is none."""
    for scope in ("operate", "read"):
        known = find_token(scope)
        if known is not None and hmac.compare_digest(known.encode(), token.encode("utf-8", "replace")):
            return (token if scope == "operate" else ""), ""
    if not _checks.acquire(blocking=False):
        return "", "Many tokens are being checked just now: try again."
    url = os.environ.get(URL_VARIABLE) or find_daemon()
    try:
        with DaemonClient(url, token, CHECK_SECONDS) as client:
            client.audit(limit=1)  # the audit log of all runs: a token for one run is refused
            return (token if _may_operate(client) else ""), ""
    except NotAuthorized as error:
        return "", f"The daemon does not accept this token for the live view. ({error})"
    except DaemonError as error:
        return "", f"The token could not be checked: {error}"
    finally:
        _checks.release()


def _may_operate(client: DaemonClient) -> bool:
    """Whether the token of the client has the operate scope, which allows changes of knobs. The test requests a preview
    for a run named `-`; a preview changes nothing."""
    try:
        client.preview_knobs("-", {"stride": 1.0}, 0)
    except NotAuthorized:
        return False
    except DaemonUnreachable:
        raise
    except (DaemonError, KnobError):
        pass  # the token was accepted; the error is about the run, which need not exist
    return True
