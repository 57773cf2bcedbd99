"""Shared parts of the commands: common options, client of the daemon, selection of a run, JSON output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import find_daemon, find_token
from tidegate.errors import ConfigError, TidegateError
from tidegate.knobs.knobs import check_path_name
from tidegate.terminal import encodable, say
from tidegate.wire.run import RunView


def utf8(param: typer.CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
    """Typer callback of options and arguments whose text is stored or sent. Returns `value` unchanged; ConfigError if
    it is not valid UTF-8."""
    for text in (value,) if isinstance(value, str) else value or ():
        encodable(text, param.opts[0] if param.opts[0].startswith("-") else (param.name or "").upper())
    return value


Daemon = Annotated[
    str | None,
    typer.Option("--daemon", help="Address of the daemon; default: the one of this user.", callback=utf8),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunOption = Annotated[
    str | None,
    typer.Option("--run", help="Name of the run; not needed while only one is running.", callback=utf8),
]
Reason = Annotated[str, typer.Option(help="Why, for the audit log.", callback=utf8)]
Wait = Annotated[float, typer.Option(help="Seconds to wait for the outcome.", min=0, max=60)]
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def client_for(scope: Literal["read", "operate"], url: str | None) -> DaemonClient:
    """A client of the daemon at `url` (None: this user's daemon), with the token for `scope`."""
    return DaemonClient(url or find_daemon(), find_token(scope))


def choose_run(client: DaemonClient, name: str | None) -> RunView:
    """The run with this name. If `name` is None: the run that is running now; ConfigError if several are running,
    TidegateError if none is."""
    if name:
        return client.run(name)
    runs = newest_first(client.runs())
    running = [run for run in runs if run.is_running]
    if len(running) == 1:
        return running[0]
    if running:
        raise ConfigError(f"Several runs are running, give one with --run: {', '.join(run.run for run in running)}.")
    known = (
        f" Earlier ones, newest first: {', '.join(run.run for run in runs[:10])}. Give one with --run." if runs else ""
    )
    raise TidegateError(f"No run is running.{known}")


def newest_first(runs: Iterable[RunView]) -> list[RunView]:
    """The runs, newest first. Versions of the daemon list runs in different orders, so they are sorted here."""
    return sorted(runs, key=lambda run: -run.started_at)


def output(message: BaseModel | list[Any], as_json: bool, print_text: Callable[[Any], None]) -> None:
    """Prints a message, or a list of messages: as JSON, or as text with `print_text`."""
    if as_json:
        say(json.dumps(to_jsonable_python(message)))
    else:
        print_text(message)


def named_places(words: Sequence[str]) -> dict[str, str]:
    """The storage paths in the values of --path, such as NAME=DIR, by name. ConfigError for any other form."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or not place:
            raise ConfigError(f"--path {word!r} is not NAME=DIR, as in --path nvme=/nvme/tide.")
        if check_path_name(name) in found:
            raise ConfigError(f"--path names {name!r} twice: give each path its own name.")
        found[name] = place
    return found


def duration(text: str, option: str) -> float:
    """Parses a duration such as `90s`, `15m`, `12h`, `30d` or `4w`, and returns its seconds. For any other text a
    ConfigError that names the option."""
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise ConfigError(f"{option} {text!r} is not a duration: give one such as 12h or 30d (s, m, h, d, w).")
    return float(int(found[1]) * _SECONDS[found[2]])
