"""The live view: what a run does now, and the gate to turn. Started here, drawn by Streamlit in `main.py`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

URL_VARIABLE = "TIDEGATE_DAEMON"
DEFAULT_URL = "http://127.0.0.1:8790"
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
    script = Path(__file__).with_name("main.py")
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tidegate.dashboard.serve", "run", str(script), *arguments]


def environment(daemon_url: str) -> dict[str, str]:
    """This process's environment with the daemon's address in it."""
    return {**os.environ, URL_VARIABLE: daemon_url}


def launch(port: int, daemon_url: str, bind: str = "127.0.0.1") -> int:
    """Serve the live view in place of this process; comes back, with 1, only when it cannot start."""
    problem = port_problem(port, bind)
    if problem is None:
        port = port or _free_port(bind)
        print(f"Live view of {daemon_url} at http://{bind}:{port} (Ctrl+C ends it).", flush=True)
        os.execve(sys.executable, command(port, daemon_url, bind), environment(daemon_url))
    print(problem, file=sys.stderr)
    return 1


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
