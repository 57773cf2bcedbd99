"""Opens the daemon's database; refuses a damaged or missing database, and leaves it unchanged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.storage.engines import BUSY_SECONDS
from tidegate.daemon.storage.state_directory import read_private, unwritable, write_private
from tidegate.daemon.storage.store import Store
from tidegate.errors import DaemonError

MARKER: Final = "database.made"
"""File in the state directory that lists the databases created for this state, one per line. A listed database must
exist: if it is missing, it was lost."""


def open_store(settings: Settings) -> Store:
    """The store of these settings. DaemonError for a lost or damaged database, which is left unchanged."""
    marker, url = settings.home / MARKER, _parsed(settings.url)
    file = _file(url)
    if file is None and _is_in_memory(url):
        raise DaemonError(
            f"--database-url {settings.url} is a database in memory, which would lose runs and knobs when the daemon "
            "ends: name a file (sqlite:////path/to/tidegate.db), or leave out --database-url."
        )
    shown = url.render_as_string(hide_password=True) if url is not None else "that --database-url names"
    name = file.name if file is not None and file == settings.database else shown
    try:
        known = read_private(marker).splitlines()
        if file is not None:
            if _size(file):
                _check(file, settings.state_dir)
            elif name in known:
                raise _lost(str(file), "is empty" if file.exists() else "is missing", marker)
            else:
                _make_private(file)
        store = Store(settings.url, _lost(name, "has no tables", marker) if name in known else None)
        if name not in known:
            write_private(marker, "\n".join([*known, name]))
    except OSError as error:
        raise DaemonError(f"The state in {settings.home} cannot be used: {unwritable(error)}.") from error
    return store


def _lost(name: str, what: str, marker: Path) -> DaemonError:
    """The error for a database that existed and is lost. `what`: its present state, such as `is missing`."""
    return DaemonError(
        f"The database {name} {what}, but earlier it existed: restore a backup of it. To start with an empty database, "
        f"without the earlier runs and knobs, remove {marker} by hand."
    )


def _check(file: Path, state_dir: Path) -> None:
    """Raises DaemonError if SQLite finds damage in the file; SQLite reads all of its pages."""
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS)) as opened:
            lines = [str(line) for (line,) in opened.execute("PRAGMA quick_check(3)")]
    except sqlite3.OperationalError:
        return  # the file is locked or cannot be opened: opening the store reports that
    except sqlite3.DatabaseError as error:
        lines = [str(error)]
    if lines != ["ok"]:
        damage = " ".join("; ".join(lines).split())
        raise DaemonError(
            f"The database {file} is damaged ({damage[:300]}): restore a backup of it. `tidegate doctor --state "
            f"{state_dir}` shows what can still be read. To start with an empty database, move {file.name}* away and "
            f"remove {file.parent / MARKER}."
        )


def _parsed(url: str) -> URL | None:
    with contextlib.suppress(ArgumentError):
        return make_url(url)
    return None


def _file(url: URL | None) -> Path | None:
    """The file of an SQLite database; None for any other database."""
    name = url.database if url is not None and url.get_backend_name() == "sqlite" else None
    return None if not name or name == ":memory:" or name.startswith("file:") else Path(name).absolute()


def _is_in_memory(url: URL | None) -> bool:
    if url is None or url.get_backend_name() != "sqlite":
        return False
    name = url.database or ""
    return name in ("", ":memory:") or "mode=memory" in url.render_as_string() or ":memory:" in name


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _make_private(file: Path) -> None:
    """Creates the database file with mode 0600. SQLite gives its other files the mode of this file."""
    with contextlib.suppress(OSError):  # the file exists, or opening the store reports why it cannot be created
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
