"""Guards the file of the SQLite database, and explains database errors.

Changes written to a database file that was deleted or replaced would be lost, so the file at the path is checked.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tidegate.errors import DaemonError

_REASONS: Final = {  # by SQLite's primary result code
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
    sqlite3.SQLITE_IOERR: "check whether its disk is full or the system's log reports errors, then try again",
    sqlite3.SQLITE_CANTOPEN: "check the owner and mode of the file and its directory, then try again",
    sqlite3.SQLITE_CORRUPT: "`tidegate doctor --state` shows what can still be read",
    sqlite3.SQLITE_NOTADB: "restore a backup of it",
    sqlite3.SQLITE_BUSY: "try again",
}


class DatabaseGoneError(SQLAlchemyError):
    """The open database file was deleted or replaced: the file at its path is another one, or missing."""


class DatabaseFile:
    """The identity (device and inode) of a database file: `remember()` stores it, `check()` compares it.

    `check()` raises DatabaseGoneError when the file at the path is another one than at `remember()`, or missing.
    """

    def __init__(self, path: str | None) -> None:
        """`path`: None for a database that is not a file; then nothing is checked."""
        self._path = Path(path).absolute() if path and path != ":memory:" and not path.startswith("file:") else None
        self._identity: tuple[int, int] | None = None

    def remember(self) -> None:
        if self._path is not None:
            self._identity = _identity(self._path)

    def check(self) -> None:
        if self._path is not None and self._identity is not None and _identity(self._path) != self._identity:
            raise DatabaseGoneError(
                f"The daemon's database {self._path} was deleted or replaced while it was open: restore it, or restart "
                "the daemon."
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file; None if it cannot be examined."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def why_unusable(error: BaseException) -> str | None:
    """The reason why the database cannot be written or read, as a sentence; None for other errors."""
    if isinstance(error, DatabaseGoneError):
        return str(error)
    if not isinstance(error, DBAPIError):
        return None
    original: Any = error.orig
    code = _code(error)
    message = (str(original).strip().splitlines() or [type(original).__name__])[0][:200].rstrip(".")
    if isinstance(code, int):
        reason = _REASONS.get(code)
        return f"The daemon's database cannot be used: {reason} (SQLite says: {message})." if reason else None
    # Other databases than SQLite: OperationalError is for "errors related to the database's operation" (PEP 249).
    is_operational = type(error).__name__ == "OperationalError" and not isinstance(original, sqlite3.Error)
    return f"The daemon's database cannot be used ({message})." if is_operational else None


@contextlib.contextmanager
def database_errors_explained(consequence: str) -> Iterator[None]:
    """Context manager that raises a DaemonError in place of the error of an unusable or locked database. The message
    has the reason, `consequence` and the remedy.

    consequence: a clause that says what was not done, as in `The daemon has not started`.
    """
    try:
        yield
    except SQLAlchemyError as error:
        why = why_unusable(error)
        if _code(error) == sqlite3.SQLITE_BUSY:
            why = "Another process holds the write lock of the daemon's database."
        if why is None:
            raise
        raise DaemonError(f"{why} {consequence}: {remedy(error) or 'solve this problem, then try again'}.") from error


def remedy(error: BaseException) -> str | None:
    """What to do about an error of SQLite; None if no remedy is known."""
    code = _code(error)
    return None if code is None else _REMEDIES.get(code)


def _code(error: BaseException) -> int | None:
    """SQLite's primary result code; None for errors of other databases."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
