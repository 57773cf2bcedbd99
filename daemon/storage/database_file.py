"""The file of an SQLite database, held against what is at its path: what is written to a deleted file is lost."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tidegate.errors import DaemonError

_REASONS: Final = {
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_READONLY: "it may not be written",
    sqlite3.SQLITE_IOERR: "its disk fails",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is damaged",
}
_REMEDIES: Final = {
    sqlite3.SQLITE_FULL: "make room on its disk, then try again",
    sqlite3.SQLITE_READONLY: "let this user write it and its directory, then try again",
    sqlite3.SQLITE_IOERR: "see whether its disk is full or the system's log tells of errors, then try again",
    sqlite3.SQLITE_CANTOPEN: "see whose it and its directory are, then try again",
    sqlite3.SQLITE_CORRUPT: "`tidegate doctor --state` shows what can still be read",
    sqlite3.SQLITE_NOTADB: "bring back a copy of it",
    sqlite3.SQLITE_BUSY: "try again",
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
    code = _code(error)
    said = (str(found).strip().splitlines() or [type(found).__name__])[0][:200].rstrip(".")
    if isinstance(code, int):
        reason = _REASONS.get(code)
        return f"The daemon's database cannot be used: {reason} (SQLite says: {said})." if reason else None
    # Of other databases: "errors related to the database's operation", by PEP 249.
    is_operational = type(error).__name__ == "OperationalError" and not isinstance(found, sqlite3.Error)
    return f"The daemon's database cannot be used ({said})." if is_operational else None


@contextlib.contextmanager
def told(undone: str) -> Iterator[None]:
    """DaemonError with the reason, with `undone` (what has not happened) and with what to do, instead of an error of a
    database that cannot be used or that another process has locked."""
    try:
        yield
    except SQLAlchemyError as error:
        why = why_unusable(error)
        if _code(error) == sqlite3.SQLITE_BUSY:
            why = "Another process holds the write lock of the daemon's database."
        if why is None:
            raise
        raise DaemonError(f"{why} {undone}: {remedy(error) or 'put that right, then try again'}.") from error


def remedy(error: BaseException) -> str | None:
    """What to do about an error of SQLite; None where that is not known."""
    code = _code(error)
    return None if code is None else _REMEDIES.get(code)


def _code(error: BaseException) -> int | None:
    """SQLite's primary result code; None for errors of others."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
