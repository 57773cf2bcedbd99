"""The file of an SQLite database, held against what is at its path: what is written to a deleted file is lost."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

_REASONS: Final = {
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_READONLY: "it may not be written",
    sqlite3.SQLITE_IOERR: "its disk fails",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is damaged",
}


class DatabaseGoneError(SQLAlchemyError):
    """The open database is not what is at its path any more."""


class DatabaseFile:
    """`check()` raises DatabaseGoneError once another file, or none, is at the path than when `note()` was called."""

    def __init__(self, path: str | None) -> None:
        """`path`: None for a database that is no file: nothing is checked."""
        self._path = Path(path).absolute() if path and path != ":memory:" and not path.startswith("file:") else None
        self._noted: tuple[int, int] | None = None

    def note(self) -> None:
        if self._path is not None:
            self._noted = _identity(self._path)

    def check(self) -> None:
        if self._path is not None and self._noted is not None and _identity(self._path) != self._noted:
            raise DatabaseGoneError(
                f"The daemon's database {self._path} was deleted or replaced while it was open: bring it back, or "
                "restart the daemon."
            )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def why_unusable(error: BaseException) -> str | None:
    """Why the database takes no changes, or gives no answers, as a sentence; None for other errors."""
    if isinstance(error, DatabaseGoneError):
        return str(error)
    if not isinstance(error, DBAPIError):
        return None
    found: Any = error.orig
    code = getattr(found, "sqlite_errorcode", None)
    said = (str(found).strip().splitlines() or [type(found).__name__])[0][:200].rstrip(".")
    if isinstance(code, int):
        reason = _REASONS.get(code & 0xFF)
        return f"The daemon's database cannot be used: {reason} (SQLite says: {said})." if reason else None
    # Of other databases: "errors related to the database's operation", by PEP 249.
    is_operational = type(error).__name__ == "OperationalError" and not isinstance(found, sqlite3.Error)
    return f"The daemon's database cannot be used ({said})." if is_operational else None
