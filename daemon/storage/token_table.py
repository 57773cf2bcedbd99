"""Table of tokens: create, list and revoke tokens; each change is written to the audit log with its author.

Only the SHA-256 digest of a token is stored.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, fields
from typing import Final

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from tidegate.client.discovery import SCOPES, Scope
from tidegate.daemon.storage.row_reader import RowReader
from tidegate.daemon.storage.schema import AuditEntry, TokenRow

ID_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    """The stored data of a token, without the token itself. Times are seconds since the epoch; `run` None: all runs."""

    digest: str
    name: str
    scope: Scope
    created_at: float
    run: str | None = None
    expires_at: float | None = None
    revoked_at: float | None = None

    @property
    def id(self) -> str:
        """The token's id for display: the first digits of its digest, which cannot be used as a token."""
        return self.digest[:ID_LENGTH]

    def state(self, now: float) -> str:
        """State of the token at the time `now`: `valid`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "valid"


_TOKEN: Final = TypeAdapter(StoredToken)


class TokenTable:
    """The tokens of one database. Every method has committed when it returns."""

    def __init__(
        self, sessions: sessionmaker[Session], reading: sessionmaker[Session], row_reader: RowReader | None = None
    ) -> None:
        """`sessions`: makes sessions that may write; `reading`: makes sessions that only read. `row_reader`: leaves out
        rows that cannot be read, and remembers their keys; with None, a new `RowReader` is created."""
        self._sessions, self._reading, self._row_reader = sessions, reading, row_reader or RowReader()

    def all(self) -> list[StoredToken]:
        """Every token, oldest first, except tokens with a scope that this version does not know."""
        with self._reading() as session:
            rows = session.scalars(select(TokenRow).order_by(TokenRow.created_at))
            return list(self._row_reader.each((row for row in rows if row.scope in SCOPES), token_of))

    def find(self, digest: str) -> StoredToken | None:
        with self._reading() as session:
            row = session.get(TokenRow, digest)
            return next(self._row_reader.each([row] if row is not None else [], token_of), None)

    def issue(
        self, scope: Scope, name: str, *, run: str | None = None, expires_at: float | None = None, actor: str = "daemon"
    ) -> str:
        """Creates a token and returns it. Only its digest is stored."""
        token = f"tide_{secrets.token_urlsafe(32)}"
        self.add(token, scope, name, run=run, expires_at=expires_at, actor=actor)
        return token

    def add(
        self,
        token: str,
        scope: Scope,
        name: str,
        *,
        run: str | None = None,
        expires_at: float | None = None,
        actor: str = "daemon",
    ) -> None:
        """Stores the digest of a given token. `actor`: who adds it, for the audit log."""
        now = time.time()
        row = TokenRow(digest=digest_of(token), name=name, scope=scope, created_at=now, run=run, expires_at=expires_at)
        with self._sessions.begin() as session:
            session.add(row)
            session.add(_entry("token_created", row, now, actor))

    def revoke(self, id: str, actor: str = "daemon") -> StoredToken | None:
        """Revokes the one token whose id begins with `id`; None when there is not exactly one such token."""
        matches = [token for token in self.all() if token.digest.startswith(id)]
        if len(matches) != 1:
            return None
        now = time.time()
        with self._sessions.begin() as session:
            row = session.get_one(TokenRow, matches[0].digest)
            if row.revoked_at is None:
                row.revoked_at = now
                session.add(_entry("token_revoked", row, now, actor))
        return self.find(matches[0].digest)


def _entry(action: str, row: TokenRow, at: float, actor: str) -> AuditEntry:
    """The audit row of a change of a token; a token for one run has its row in the audit log of that run."""
    facts = {"token": row.digest[:ID_LENGTH], "scope": row.scope, "name": row.name, "expires_at": row.expires_at}
    return AuditEntry(
        timestamp=at,
        actor=actor,
        action=action,
        run=row.run or "",
        generation=None,
        before={},
        after={name: value for name, value in facts.items() if value is not None},
        reason="",
        effect="",
    )


def digest_of(token: str) -> str:
    """SHA-256 of the token in hex. Tokens are 256 random bits, so a slow hash would not add protection."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_of(row: TokenRow) -> StoredToken:
    """The token of a database row. Raises for a row that cannot be read; such a token is invalid."""
    return _TOKEN.validate_python({field.name: getattr(row, field.name) for field in fields(StoredToken)})
