"""The stored tokens: made, listed, withdrawn; the audit log says when and by whom. Only their SHA-256 is kept."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, fields
from typing import Final

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from tidegate.client.daemon_client import SCOPES, Scope
from tidegate.daemon.storage.row_reader import Readable
from tidegate.daemon.storage.schema import AuditEntry, TokenRow

ID_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    """A token without the token. Times are seconds since the epoch; `run` None opens all runs."""

    digest: str
    name: str
    scope: Scope
    created_at: float
    run: str | None = None
    expires_at: float | None = None
    revoked_at: float | None = None

    @property
    def id(self) -> str:
        """What it is called where people see it: the beginning of its digest, which opens nothing."""
        return self.digest[:ID_LENGTH]

    def state(self, now: float) -> str:
        """`valid`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "valid"


_TOKEN: Final = TypeAdapter(StoredToken)


class TokenTable:
    """The tokens of one database. Every method has committed when it returns."""

    def __init__(
        self, sessions: sessionmaker[Session], reading: sessionmaker[Session], readable: Readable | None = None
    ) -> None:
        """`reading`: sessions that only read."""
        self._sessions, self._reading, self._readable = sessions, reading, readable or Readable()

    def all(self) -> list[StoredToken]:
        """Every token, oldest first; those of a scope that this version does not know are left out."""
        with self._reading() as session:
            rows = session.scalars(select(TokenRow).order_by(TokenRow.created_at))
            return list(self._readable.each((row for row in rows if row.scope in SCOPES), token_of))

    def find(self, digest: str) -> StoredToken | None:
        with self._reading() as session:
            row = session.get(TokenRow, digest)
            return next(self._readable.each([row] if row is not None else [], token_of), None)

    def issue(
        self, scope: Scope, name: str, *, run: str | None = None, expires_at: float | None = None, actor: str = "daemon"
    ) -> str:
        """Makes a token. It is returned once and kept nowhere."""
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
        """Makes a token known. `actor`: who does it, for the audit log."""
        now = time.time()
        row = TokenRow(digest=digest_of(token), name=name, scope=scope, created_at=now, run=run, expires_at=expires_at)
        with self._sessions.begin() as session:
            session.add(row)
            session.add(_entry("token_created", row, now, actor))

    def revoke(self, id: str, actor: str = "daemon") -> StoredToken | None:
        """Withdraws the one token whose id begins with `id`; None when there is not exactly one."""
        found = [token for token in self.all() if token.digest.startswith(id)]
        if len(found) != 1:
            return None
        now = time.time()
        with self._sessions.begin() as session:
            row = session.get_one(TokenRow, found[0].digest)
            if row.revoked_at is None:
                row.revoked_at = now
                session.add(_entry("token_revoked", row, now, actor))
        return self.find(found[0].digest)


def _entry(action: str, row: TokenRow, at: float, actor: str) -> AuditEntry:
    """Of the audit log; of a token for one run it is in that run's."""
    told = {"token": row.digest[:ID_LENGTH], "scope": row.scope, "name": row.name, "expires_at": row.expires_at}
    return AuditEntry(
        timestamp=at,
        actor=actor,
        action=action,
        run=row.run or "",
        generation=None,
        before={},
        after={name: value for name, value in told.items() if value is not None},
        reason="",
        effect="",
    )


def digest_of(token: str) -> str:
    """SHA-256 in hex. Tokens are 256 random bits, so that a slow hash would protect nothing."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_of(row: TokenRow) -> StoredToken:
    """Raises for a row that cannot be read: such a token opens nothing."""
    return _TOKEN.validate_python({field.name: getattr(row, field.name) for field in fields(StoredToken)})
