"""The live view: what a run does now, and the gate to turn. Started here, served by `served.py`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from tidegate.client.daemon_client import find_token, token_dir
from tidegate.dashboard.session import one_time_codes

URL_VARIABLE = "TIDEGATE_DAEMON"
DEFAULT_URL = "http://127.0.0.1:8790"
OPEN_VARIABLE = "TIDEGATE_OPEN"
"""The address at which the server answers, and the page that it opens in a browser then."""
HOSTS_VARIABLE = "TIDEGATE_DASHBOARD_HOSTS"
"""More names that the live view has, with commas between them; `*` for any."""
PUBLIC_VARIABLE = "TIDEGATE_DASHBOARD_PUBLIC"
"""`1`: everybody who reaches the live view may look."""
OPEN_PATH = "/open"
SIGN_IN_PATH = "/enter"
HEALTH_PATH = "/_stcore/health"
MAX_UPLOAD_MB = 1
"""Of a model's config.json, the one thing that is uploaded."""


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
    script = Path(__file__).parent / "server" / "app.py"
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tidegate.dashboard.server.serve", "run", str(script), *arguments]


def environment(daemon_url: str) -> dict[str, str]:
    """This process's environment with the daemon's address in it."""
    return {**os.environ, URL_VARIABLE: daemon_url}


def launch(
    port: int,
    daemon_url: str,
    bind: str = "127.0.0.1",
    browse: bool = False,
    names: tuple[str, ...] = (),
    public: bool = False,
) -> int:
    """Serve the live view in place of this process; comes back, with 1, only when it cannot start.

    browse: open it in a browser when it answers. names: those that it has beside addresses and this machine's name.
    public: whoever reaches it may look, without link or token.
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
    """The address with a new one-time code that gives a browser a session: with the operate scope where this user has
    the operate token, else only to look. None where codes cannot be kept."""
    try:
        return f"{address}{OPEN_PATH}?code={one_time_codes.mint()}"
    except OSError:
        return None


def page_to_open(link: str | None, address: str) -> str:
    """What a browser is told to open; the code is not in it, since other users see the arguments of a program."""
    if link is None:
        return address
    try:
        return one_time_codes.redirect_file(link).as_uri()
    except OSError:
        return address


def wants_browser() -> bool:
    """Whether there is somebody at a terminal, with a browser that has a window of its own."""
    windows = sys.platform == "darwin" or any(os.environ.get(n) for n in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    return windows and sys.stdin.isatty() and sys.stdout.isatty()


def _entry(link: str | None, bind: str, public: bool) -> Iterator[str]:
    """Who may look, and how to get in, in sentences."""
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
    """Why a link only lets look, and what to do, as a sentence; empty where it lets turn knobs, too."""
    if find_token("operate") is not None:
        return ""
    return (
        f"Links only let look: there is no operate token in {token_dir()}. The daemon writes it to operate.token in "
        "its state directory: paste it into the page Tune, or name it in TIDEGATE_OPERATE_TOKEN."
    )


def no_link() -> str:
    """Why there is no link, after `There is`."""
    return (
        f"no link: {one_time_codes.folder()}, where codes are kept, cannot be written. Paste a token into the page "
        "that opens."
    )


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bind).is_loopback
    return bind == "localhost"


def port_problem(port: int, bind: str) -> str | None:
    """Why the live view cannot listen there, as one sentence; None when it can."""
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
