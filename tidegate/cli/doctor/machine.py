"""`tidegate doctor`: checks what this machine has, and what is missing or broken. Each check tests the real
component."""

from __future__ import annotations

import errno
import importlib
import os
import platform
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.table import Table
from rich.text import Text

from tidegate.cli.tables import console
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import DEFAULT_URL, find_token, state_dir
from tidegate.client.state_files import home_of, read_no_link
from tidegate.errors import ConfigError, DaemonError, StorageError
from tidegate.terminal import visible

Verdict = Literal["good", "missing", "bad"]
NUMA_NODES: Final = Path("/sys/devices/system/node")
START_DAEMON: Final = (
    "start one with `tidegate daemon`, with the port and the state directory that it had before, if any"
)
_SYMBOLS: Final[dict[Verdict, Text]] = {
    "good": Text("ok", "green"),
    "missing": Text("--", "yellow"),
    "bad": Text("!!", "red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, a verdict, and the details as text.

    verdict: `good`; `missing` for something that is absent, not complete or left over, but not faulty; `bad` for
    something that is faulty and must be repaired.
    """

    check: str
    verdict: Verdict
    detail: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(daemon_url: str) -> list[Finding]:
    """Runs all checks of the machine. A check that fails with an unexpected error gives a finding, too."""
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("python", _python),
        ("cpus", _cpus),
        ("torch", _torch),
        ("kernels", _kernels),
        ("daemon", lambda: _daemon(daemon_url)),
        ("tokens", _tokens),
        ("ports", lambda: _ports(daemon_url)),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # a broken driver may raise any exception, and that is a finding
            findings.append(Finding(name, "bad", f"{type(error).__name__}: {error}".splitlines()[0]))
    return findings


def print_findings(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(_SYMBOLS[finding.verdict], visible(finding.check), visible(finding.detail))
    console.print(table)


def remove_if_confirmed(
    check: str,
    what: str,
    listed: str,
    found: Sequence[Any],
    remove: Callable[[Any], None],
    yes: bool,
    ask: Callable[[str], bool],
) -> list[Finding]:
    """Removes each of `found` (things with `directory` and `nbytes`) with `remove`, and returns a finding for each.

    Unless `yes` is True, `ask(question)` is called first; if it returns False, nothing is removed. ConfigError when the
    user must be asked, but there is no terminal. check: name of the findings. what, listed: texts for the question.
    """
    total = f"{sum(one.nbytes for one in found) / 1e6:,.1f} MB"
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            f"Nothing was removed: there is no terminal to ask on. Add --yes to remove {what}, {total}:\n{listed}"
        )
    if not yes and not ask(f"{listed}\nRemove {what}, {total}?"):
        return [Finding(check, "missing", "nothing was removed")]
    done = []
    for one in found:
        try:
            remove(one)
            done.append(Finding(check, "good", f"removed {one.directory}, {one.nbytes / 1e6:,.1f} MB"))
        except StorageError as error:
            done.append(Finding(check, "bad", str(error)))
    return done


def _python() -> list[Finding]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 11) and platform.system() == "Linux"
    return [Finding("python", "good" if good else "bad", detail if good else f"{detail}: 3.11 on Linux is needed")]


def _cpus(nodes: Path = NUMA_NODES) -> list[Finding]:
    mine, count = len(os.sched_getaffinity(0)), len(list(nodes.glob("node[0-9]*")))
    detail = f"{mine} of {os.cpu_count()}"
    if count > 1:
        detail += f", on {count} NUMA nodes: let the launcher bind each rank to the cores near its GPU, for example "
        detail += "with torchrun --numa-binding=exclusive"
    return [Finding("cpus", "good", detail)]


def _torch() -> list[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return [Finding("torch", "missing", "not installed; training needs it: pip install 'tidegate[agent]'")]
    found = [Finding("torch", "good", str(torch.__version__))]
    if not torch.cuda.is_available():
        return [*found, Finding("device", "missing", "no CUDA device: training uses the emulated one")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Finding("device", "good", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    return found


def _kernels() -> list[Finding]:
    try:
        kernels = importlib.import_module("tidegate.kernels")
    except ImportError as error:
        return [Finding("kernels", "missing", f"not built ({error}); training needs them")]
    return [Finding("kernels", "good", f"instruction set {kernels.instruction_set()}")]


def _daemon(url: str) -> list[Finding]:
    try:
        with DaemonClient(url, find_token("read")) as client:
            if not client.health():
                return [Finding("daemon", "missing", f"none answers at {url}: {START_DAEMON}")]
            runs = client.runs()
    except DaemonError as error:
        return [Finding("daemon", "bad", str(error))]
    return [Finding("daemon", "good", f"{url}, {len(runs)} run{'' if len(runs) == 1 else 's'}")]


def _tokens() -> list[Finding]:
    found = []
    for scope in ("read", "operate", "agent"):
        path = home_of(state_dir()) / f"{scope}.token"
        try:
            if path.is_symlink():
                raise OSError(errno.ELOOP, "is a symbolic link, which is not followed")
            mode = stat.S_IMODE(read_no_link(path)[1].st_mode)
        except FileNotFoundError:
            found.append(Finding(f"{scope} token", "missing", f"no {path}: the daemon writes it at its first start"))
        except OSError as error:
            found.append(Finding(f"{scope} token", "bad", f"{path}: {error.strerror}"))
        else:
            private = not mode & 0o077
            detail = f"{path}, mode {mode:04o}" + ("" if private else f": others can read it, chmod 600 {path}")
            found.append(Finding(f"{scope} token", "good" if private else "bad", detail))
    return found


def _ports(daemon_url: str) -> list[Finding]:
    live_view, runs = _port(8501, "the live view", False), DaemonClient(daemon_url).health()
    if runs and daemon_url != DEFAULT_URL:
        return [Finding("port 8790", "good", f"not needed: the daemon runs at {daemon_url}"), live_view]
    return [_port(8790, "the daemon", runs), live_view]


def _port(port: int, user: str, ours: bool) -> Finding:
    if ours:
        return Finding(f"port {port}", "good", f"{user} listens there")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(f"port {port}", "missing", f"{error.strerror}: give {user} another one with --port")
    return Finding(f"port {port}", "good", f"free for {user}")
