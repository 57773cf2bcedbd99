"""The live view: what a run does now, and the gate to turn. Started here, served by `served.py`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tidegate.client import find_token, token_dir
from tidegate.dashboard import codes

URL_VARIABLE = "TIDEGATE_DAEMON"
DEFAULT_URL = "http://127.0.0.1:8790"
OPEN_VARIABLE = "TIDEGATE_OPEN"
"""The address at which the server answers, and the page that it opens in a browser then."""
HOSTS_VARIABLE = "TIDEGATE_DASHBOARD_HOSTS"
"""More names that the live view has, with commas between them; `*` for any."""
OPEN_PATH = "/open"
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
    script = Path(__file__).with_name("served.py")
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tidegate.dashboard.serve", "run", str(script), *arguments]


def environment(daemon_url: str) -> dict[str, str]:
    """This process's environment with the daemon's address in it."""
    return {**os.environ, URL_VARIABLE: daemon_url}


def launch(
    port: int, daemon_url: str, bind: str = "127.0.0.1", browse: bool = False, names: tuple[str, ...] = ()
) -> int:
    """Serve the live view in place of this process; comes back, with 1, only when it cannot start.

    browse: open it in a browser when it answers. names: those that it has beside addresses and this machine's name.
    """
    problem = port_problem(port, bind)
    if problem is None:
        port = port or _free_port(bind)
        env = environment(daemon_url)
        if names:
            env[HOSTS_VARIABLE] = ",".join(names)
        address = address_of(port, bind)
        print(f"Live view of {daemon_url} at {address} (Ctrl+C ends it).")
        link = link_to(address)
        print(f"To turn knobs, open (once, within 10 minutes) {link}" if link else read_only(), flush=True)
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
    """The address with a new one-time code that gives a browser the operate scope. None where this user has no operate
    token, or no folder for codes."""
    if find_token("operate") is None:
        return None
    try:
        return f"{address}{OPEN_PATH}?code={codes.mint()}"
    except OSError:
        return None


def page_to_open(link: str | None, address: str) -> str:
    """What a browser is told to open; the code is not in it, since other users see the arguments of a program."""
    if link is None:
        return address
    try:
        return codes.redirect_file(link).as_uri()
    except OSError:
        return address


def wants_browser() -> bool:
    """Whether there is somebody at a terminal, with a browser that has a window of its own."""
    windows = sys.platform == "darwin" or any(os.environ.get(n) for n in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    return windows and sys.stdin.isatty() and sys.stdout.isatty()


def read_only() -> str:
    """Why there is no link, and what to do, as a sentence."""
    return f"The live view is read-only: there is {no_link()}"


def no_link() -> str:
    """What is missing for a link: the token, or a folder for codes."""
    if find_token("operate") is None:
        return (
            f"no operate token in {token_dir()}. The daemon writes it to operate.token in its state directory: paste "
            "it into the page Tune, or name it in TIDEGATE_OPERATE_TOKEN."
        )
    return f"no way to write to {codes.folder()}, where codes for links are kept. Paste the token into the page Tune."


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
