"""Bearer tokens: who may do what. Tokens are stored as SHA-256; the first start writes one a scope to private files."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.client import SCOPES, Scope
from tidegate.daemon.settings import Settings
from tidegate.daemon.store import Store
from tidegate.errors import DaemonError

FILED: Final[tuple[Scope, ...]] = SCOPES
READERS: Final[frozenset[Scope]] = frozenset({"read", "operate", "agent"})
REFRESH_SECONDS: Final = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds the token."""

    name: str
    scope: Scope


def scopes_allowed(method: str, path: str) -> frozenset[Scope] | None:
    """The scopes that may do this; None where no token is needed. What is not named here is closed."""
    if path in ("/healthz", "/readyz", "/metrics", "/sd"):
        return None
    if method in ("GET", "HEAD"):
        return READERS
    if path == "/v1/alerts" and method == "POST":
        return frozenset({"alert"})
    return frozenset({"agent"}) if path == "/v1/agents" or path.startswith("/v1/agents/") else frozenset({"operate"})


class Tokens:
    """The tokens of the store, read again every two seconds so that new and withdrawn ones take effect."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: list[tuple[str, Caller]] = []
        self._read_at = -REFRESH_SECONDS

    def check(self, token: str) -> Caller | None:
        """Whose token it is. Every stored digest is compared, each in constant time."""
        if self._clock() - self._read_at >= REFRESH_SECONDS:
            self._known = [(d, Caller(name, scope)) for d, name, scope in self._store.tokens() if scope in SCOPES]
            self._read_at = self._clock()
        asked, found = _digest(token), None
        for digest, caller in self._known:
            if hmac.compare_digest(asked, digest):
                found = caller
        return found


def issue(store: Store, scope: Scope, name: str) -> str:
    """Makes a token. It is returned once and kept nowhere."""
    token = f"tide_{secrets.token_urlsafe(32)}"
    store.add_token(_digest(token), name, scope, time.time())
    return token


def make_token(settings: Settings, scope: Scope, name: str) -> str:
    """A new token in the database of the settings, whether or not a daemon runs on it."""
    settings.make_state_dir()
    store = Store(settings.url)
    try:
        return issue(store, scope, name[:64])
    finally:
        store.close()


def ensure_files(store: Store, state_dir: Path) -> None:
    """Makes sure that the token file of every scope in FILED exists, is private and is known to the store."""
    for scope in FILED:
        path = state_dir / f"{scope}.token"
        try:
            token = _read_private(path)
            if token:
                store.add_token(_digest(token), scope, scope, time.time())
            else:
                _write_private(path, issue(store, scope, scope))
        except OSError as error:
            raise DaemonError(f"The token file {path} cannot be used: {error.strerror}.") from error


def read_files(store: Store, token_dir: Path) -> None:
    """Makes the tokens in the files `<scope>.token` known to the store; those of scopes in FILED have to be there.

    Whoever mounts the files says who may read them: their modes are left alone. DaemonError for one without a token.
    """
    for scope in SCOPES:
        path = token_dir / f"{scope}.token"
        if scope not in FILED and not path.exists():
            continue
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise DaemonError(f"The token file {path} cannot be read: {error.strerror}.") from error
        if not token:
            raise DaemonError(f"The token file {path} is empty: write a long random text into it.")
        store.add_token(_digest(token), scope, scope, time.time())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _read_private(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mode & 0o077:
            log.warning("%s could be read by others: its mode is now 0600. Delete it to get a new token.", path)
            path.chmod(0o600)
        return path.read_text().strip()
    return ""


def _write_private(path: Path, text: str) -> None:
    """Never readable by others, not for a moment; complete or not there."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
