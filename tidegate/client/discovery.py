"""Finds the daemon of this user: the state directory, the address, and the token for a scope."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from pathlib import Path
from typing import Final, Literal, get_args

from tidegate.client.daemon_proof import FromState
from tidegate.client.state_files import home_of, read_no_link
from tidegate.errors import ConfigError, NotAuthorized
from tidegate.terminal import encodable

Scope = Literal["read", "operate", "agent", "alert"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
DEFAULT_URL: Final = "http://127.0.0.1:8790"


def state_dir() -> Path:
    """The state directory of this user's daemon: TIDEGATE_STATE_DIR, else XDG_STATE_HOME/tidegate, else
    ~/.local/state/tidegate."""
    if given := os.environ.get("TIDEGATE_STATE_DIR"):
        return _expanded(given)
    return _expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "tidegate"


def token_dir() -> Path:
    """The folder of the files `<scope>.token`: TIDEGATE_TOKEN_DIR (for example mounted secrets), else the folder of the
    daemon's state."""
    given = os.environ.get("TIDEGATE_TOKEN_DIR")
    return _expanded(given) if given else home_of(state_dir())


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path!r} names the home directory of an unknown user: give TIDEGATE_STATE_DIR a path without '~'."
        ) from error


def find_token(scope: Scope) -> str | None:
    """The token for `scope`: TIDEGATE_<SCOPE>_TOKEN, else TIDEGATE_TOKEN, else the file `<scope>.token` in
    `token_dir()`; None if there is none. For `read`, TIDEGATE_OPERATE_TOKEN comes before the files, and where
    `read.token` is missing, the file of `operate` or `agent` is used.

    A token from the state directory is a `FromState`: a client sends it only after the server has proved that it is the
    daemon of that directory. NotAuthorized for a token file that is not UTF-8; ConfigError for an invalid directory
    name.
    """
    variables = [f"TIDEGATE_{scope.upper()}_TOKEN", "TIDEGATE_TOKEN"]
    for name in [*variables, "TIDEGATE_OPERATE_TOKEN"] if scope == "read" else variables:
        if given := os.environ.get(name, "").strip():
            return given
    names = ("read", "operate", "agent") if scope == "read" else (scope,)
    folder, mounted = token_dir(), bool(os.environ.get("TIDEGATE_TOKEN_DIR"))
    for name in names:
        path = folder / f"{name}.token"
        try:
            token = (path.read_text("utf-8") if mounted else read_no_link(path)[0]).strip()
        except OSError:
            continue
        except UnicodeDecodeError as error:
            raise NotAuthorized(
                f"{path} is not a token file (byte {error.start} is not UTF-8): copy the daemon's file again.", 401
            ) from error
        if token:
            return token if mounted else FromState.of(token, folder)
    return None


def find_daemon() -> str:
    """The daemon's address: TIDEGATE_DAEMON, else the address that the local daemon wrote to daemon.json, else
    DEFAULT_URL.

    An address from daemon.json is a `FromState`: a client sends no token to it before the server has proved that it is
    the daemon of this state directory.
    """
    if given := os.environ.get("TIDEGATE_DAEMON"):
        return encodable(given, "TIDEGATE_DAEMON")
    home = home_of(state_dir())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return FromState.of(str(json.loads(read_no_link(home / "daemon.json")[0])["url"]), home)
    return DEFAULT_URL


def is_loopback(bind: str) -> bool:
    """Whether a server that listens on `bind` can be reached from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bind).is_loopback
    return bind == "localhost"
