"""The live view: a dashboard that shows runs and changes their knobs. This module starts its server (`server/`)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from tidegate.client.discovery import find_token, is_loopback, token_dir
from tidegate.dashboard.session import one_time_codes

URL_VARIABLE = "TIDEGATE_DAEMON"
DEFAULT_URL = "http://127.0.0.1:8790"
OPEN_VARIABLE = "TIDEGATE_OPEN"
"""Environment variable with two addresses: the server's health check, and the page that the server opens in a browser
once it is ready."""
HOSTS_VARIABLE = "TIDEGATE_DASHBOARD_HOSTS"
"""Environment variable with additional host names of the live view, separated by commas; `*` accepts any name."""
PUBLIC_VARIABLE = "TIDEGATE_DASHBOARD_PUBLIC"
"""Environment variable. Value `1`: every browser that can reach the live view may read it without a session."""
OPEN_PATH = "/open"
SIGN_IN_PATH = "/enter"
HEALTH_PATH = "/_stcore/health"
MAX_UPLOAD_MB = 1
"""Largest upload in MB. Only a model's config.json is uploaded."""


def command(port: int, daemon_url: str, bind: str = "127.0.0.1") -> list[str]:
    """The command that serves the live view; run it with `environment(daemon_url)`."""
    options = {
        "server.port": port,
        "server.address": bind,
        "server.headless": "true",
        "server.maxUploadSize": MAX_UPLOAD_MB,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "theme.light.primaryColor": "#0072B2",
        "theme.dark.primaryColor": "#1E86C8",
    }
    script = Path(__file__).parent / "app" / "asgi.py"
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tidegate.dashboard.server.serve", "run", str(script), *arguments]


def environment(daemon_url: str) -> dict[str, str]:
    """This process's environment variables, with the daemon's address added."""
    return {**os.environ, URL_VARIABLE: daemon_url}


def launch(
    port: int,
    daemon_url: str,
    bind: str = "127.0.0.1",
    browse: bool = False,
    names: tuple[str, ...] = (),
    public: bool = False,
) -> int:
    """Replaces this process by the server of the live view; returns 1 if the server cannot start.

    browse: opens the live view in a browser when it is ready. names: host names in addition to addresses and this
    machine's name. public: read access without link or token.
    """
    problem = port_problem(port, bind)
    if problem is None:
        port = port or _free_port(bind)
        env = environment(daemon_url) | {PUBLIC_VARIABLE: "1" if public else ""}
        if names:
            env[HOSTS_VARIABLE] = ",".join(names)
        address = address_of(port, bind)
        print(f"Live view of {daemon_url} at {address} (Ctrl+C ends it).")
        link = link_to(address)
        for sentence in _entry(link, bind, public):
            print(sentence, flush=True)
        if browse:
            env[OPEN_VARIABLE] = f"{address}{HEALTH_PATH} {page_to_open(link, address)}"
        os.execve(sys.executable, command(port, daemon_url, bind), env)
    print(problem, file=sys.stderr)
    return 1


def address_of(port: int, bind: str = "127.0.0.1") -> str:
    """The live view's address for a browser on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def link_to(address: str) -> str | None:
    """The address with a new one-time code, which gives a browser a session. None if codes cannot be stored.

    The session has the operate scope if this user has the operate token, else it is read-only.
    """
    try:
        return f"{address}{OPEN_PATH}?code={one_time_codes.mint()}"
    except OSError:
        return None


def page_to_open(link: str | None, address: str) -> str:
    """The URL with which a browser is started: the URL of a private file that redirects to `link`. It is `address` if
    there is no link, or if the file cannot be written.

    The file is needed because other users can see the arguments with which a program is started, and the link contains
    the one-time code.
    """
    if link is None:
        return address
    try:
        return one_time_codes.redirect_file(link).as_uri()
    except OSError:
        return address


def wants_browser() -> bool:
    """Whether the process has a terminal, and a browser with a window can be opened."""
    windows = sys.platform == "darwin" or any(os.environ.get(n) for n in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    return windows and sys.stdin.isatty() and sys.stdout.isatty()


def _entry(link: str | None, bind: str, public: bool) -> Iterator[str]:
    """Sentences that are printed at start: how to open the live view, and who has access."""
    if link:
        yield f"Open (once, within 10 minutes) {link}"
    else:
        yield f"There is {no_link()}"
    if only_looks := read_only():
        yield only_looks
    if public:
        yield f"--public: whoever reaches {bind} sees all runs, without link or token."
    elif not is_loopback(bind):
        yield (
            f"Listening on {bind}, for other machines too. Each browser needs a link or a token; these pass "
            "unencrypted, unless a proxy with TLS is in front."
        )


def read_only() -> str:
    """The reason why links are read-only, and the remedy, as a sentence; empty if links allow changes of knobs."""
    if find_token("operate") is not None:
        return ""
    return (
        f"Links give read access only: there is no operate token in {token_dir()}. The daemon writes it to "
        "operate.token in its state directory: paste it into the page Tune, or name it in TIDEGATE_OPERATE_TOKEN."
    )


def no_link() -> str:
    """A sentence that says why there is no link with which to sign in."""
    return (
        f"There is no link with which to sign in: {one_time_codes.folder()}, where one-time codes are kept, cannot be "
        "written. Paste a token into the page that opens."
    )


def port_problem(port: int, bind: str) -> str | None:
    """The reason why the live view cannot listen on this port, as one sentence; None if it can."""
    with socket.socket(_family(bind)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return (
                f"The live view cannot listen on {bind}:{port} ({reason}). "
                "Give another port with --port, or end what uses this one."
            )
    return None


def _free_port(bind: str) -> int:
    with socket.socket(_family(bind)) as probe:
        probe.bind((bind, 0))
        return int(probe.getsockname()[1])


def _family(bind: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in bind else socket.AF_INET
