"""Token authentication: finds the caller who holds a token. `scopes.py` defines what the caller may do.

The daemon's first start writes one token of each scope to private files.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidegate.client.discovery import SCOPES, Scope
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.state_directory import read_private, unwritable, write_private
from tidegate.daemon.storage.store import Store
from tidegate.daemon.storage.token_table import StoredToken, digest_of
from tidegate.errors import DaemonError

REFRESH_SECONDS: Final = 2.0
"""Age in seconds at which the tokens in memory are read from the store again."""
SHORTEST_TOKEN: Final = 16
LONGEST_TOKEN: Final = 1_024
"""Maximum length in characters of a token in a token directory. `SHORTEST_TOKEN` is the minimum length."""
UNKNOWN_REFRESH_SECONDS: Final = 0.2
"""Age in seconds at which the tokens in memory are read from the store again when a request has an unknown token, which
may be a new one."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a valid token. `token`: id of the token. `run`: the only run that it gives access to; None: all."""

    name: str
    scope: Scope
    run: str | None = None
    token: str = field(default="", compare=False)

    def may_see(self, run: str) -> bool:
        return self.run is None or self.run == run

    def check_run(self, run: str) -> None:
        """Raises a 403 problem where the token is for another run."""
        if not self.may_see(run):
            raise ProblemError(403, "wrong-run", f"The token is valid for run {self.run!r} only.")


def bearer(header: str) -> str:
    """The bearer token in the value of an Authorization header; empty where there is none."""
    kind, _, token = header.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


class Tokens:
    """The store's tokens in memory.

    They are read again when they are two seconds old, so that revoked tokens are refused, and when a request has an
    unknown token, which may be new. Requests that wait are told when their token ends (`check_waiting`).
    """

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall = wall
        self._known: list[StoredToken] = []
        self._read_at = -REFRESH_SECONDS
        self._waiting: dict[str, dict[object, Callable[[], object]]] = {}
        """Functions to call when a token ends, by token."""

    def check(self, token: str) -> Caller | str:
        """The caller of a token, or the reason why the token is rejected: `wrong`, `expired` or `revoked`.

        The token is compared with every stored digest, each in constant time.
        """
        digest = digest_of(token)
        self._refresh(REFRESH_SECONDS)
        stored = self._find(digest)
        if stored is None and self._refresh(UNKNOWN_REFRESH_SECONDS):
            stored = self._find(digest)
        if stored is None:
            return "wrong"
        state = stored.state(self._wall())
        return Caller(stored.name, stored.scope, stored.run, stored.id) if state == "valid" else state

    def is_valid(self, token: str) -> bool:
        return isinstance(self.check(token), Caller)

    @contextmanager
    def call_at_end(self, token: str, on_end: Callable[[], object]) -> Iterator[None]:
        """Context manager: while it is active, `check_waiting` calls `on_end` if the token is not valid any more."""
        key = object()
        self._waiting.setdefault(token, {})[key] = on_end
        try:
            yield
        finally:
            del self._waiting[token][key]
            if not self._waiting[token]:
                del self._waiting[token]

    def check_waiting(self) -> None:
        """Checks all tokens of waiting requests, and wakes the requests whose token is not valid any more."""
        for token, on_ends in tuple(self._waiting.items()):
            if not self.is_valid(token):
                for on_end in tuple(on_ends.values()):
                    on_end()

    def _refresh(self, age: float) -> bool:
        """Reads the tokens again if those in memory are at least `age` seconds old. Returns whether it has read."""
        if self._clock() - self._read_at < age:
            return False
        self._known = self._store.tokens.all()
        self._read_at = self._clock()
        return True

    def _find(self, digest: str) -> StoredToken | None:
        match = None
        for known in self._known:
            if hmac.compare_digest(digest, known.digest):
                match = known
        return match


def ensure_files(store: Store, home: Path) -> None:
    """Makes sure that the token file of every scope exists, is private and contains a valid token."""
    for scope in SCOPES:
        path = home / f"{scope}.token"
        try:
            token = read_private(path)
            known = store.tokens.find(digest_of(token)) if token else None
            if token and known is None:
                store.tokens.add(token, scope, scope)  # the database was created anew, the file was kept
            elif known is None or known.state(time.time()) != "valid":
                write_private(path, store.tokens.issue(scope, scope))
        except OSError as error:
            raise DaemonError(f"The token file {path} cannot be used: {unwritable(error)}.") from error


def read_files(store: Store, token_dir: Path) -> None:
    """Adds the tokens in the files `<scope>.token`, one for every scope, to the store.

    The modes of the files are not checked: the administrator who mounts the files decides who may read them.
    DaemonError for a file without a token, or with a token that is of another scope, expired or revoked.
    """
    for scope in SCOPES:
        path = token_dir / f"{scope}.token"
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise DaemonError(f"The token file {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise DaemonError(f"The token file {path} is not a text file: write a long random text into it.") from error
        if not token:
            raise DaemonError(f"The token file {path} is empty: write a long random text into it.")
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise DaemonError(
                f"The token in {path} has characters that no client can send: write a long random text of printable "
                "ASCII characters without blanks into it."
            )
        if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
            raise DaemonError(
                f"The token in {path} has {len(token)} characters, but must have from {SHORTEST_TOKEN} to "
                f"{LONGEST_TOKEN}: write a long random text into it, for example from `openssl rand -hex 32`."
            )
        known = store.tokens.find(digest_of(token))
        if known is None:
            store.tokens.add(token, scope, scope)
        elif known.scope != scope or (state := known.state(time.time())) != "valid":
            why = f"is of scope {known.scope}" if known.scope != scope else f"is {state}"
            raise DaemonError(f"The token in {path} {why}: write another one into it.")
