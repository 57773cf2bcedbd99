"""Opening the daemon's database: one that is damaged, or gone where there was one, is refused and left as it is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.storage.state_directory import read_private, unwritable, write_private
from tidegate.daemon.storage.store import BUSY_SECONDS, Store
from tidegate.errors import DaemonError

MARKER: Final = "database.made"
"""Names the databases that were made for this state, one a line. One that is named must be there."""


def open_store(settings: Settings) -> Store:
    """The store of these settings; DaemonError, and nothing is changed, for a database that was lost or is damaged."""
    marker, file = settings.home / MARKER, _file(settings.url)
    if file is None and _is_in_memory(settings.url):
        raise DaemonError(
            f"--database-url {settings.url} is a database in memory, and the daemon keeps what it acknowledges: name a "
            "file (sqlite:////path/to/tidegate.db), or leave --database-url out."
        )
    name = file.name if file == settings.database else _shown(settings.url)
    try:
        known = read_private(marker).splitlines()
        if file is not None:
            if _size(file):
                _check(file, settings.state_dir)
            elif name in known:
                raise _lost(str(file), "is empty" if file.exists() else "is missing", marker)
            else:
                _make_private(file)
        if_new = _lost(name, "has no tables", marker) if name in known else None
        store = Store(settings.url, if_new)
        if name not in known:
            write_private(marker, "\n".join([*known, name]))
    except OSError as error:
        raise DaemonError(f"The state in {settings.home} cannot be used: {unwritable(error)}.") from error
    return store


def _lost(name: str, what: str, marker: Path) -> DaemonError:
    return DaemonError(
        f"The database {name} {what}, and there was one: bring back a copy of it. To begin anew, without the runs and "
        f"knobs of before, remove {marker} by hand."
    )


def _check(file: Path, state_dir: Path) -> None:
    """What SQLite finds wrong with the file's pages; it reads all of them."""
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS)) as opened:
            lines = [str(line) for (line,) in opened.execute("PRAGMA quick_check(3)")]
    except sqlite3.OperationalError:
        return  # it is locked, or may not be opened: the store says so
    except sqlite3.DatabaseError as error:
        lines = [str(error)]
    if lines != ["ok"]:
        told = " ".join("; ".join(lines).split())
        raise DaemonError(
            f"The database {file} is damaged ({told[:300]}): bring back a copy of it. `tidegate doctor --state "
            f"{state_dir}` shows what can still be read. To begin anew, move {file.name}* away and remove "
            f"{file.parent / MARKER}."
        )


def _file(url: str) -> Path | None:
    """The file of an SQLite database; None for any other."""
    try:
        made = make_url(url)
    except ArgumentError:
        return None
    name = made.database if made.get_backend_name() == "sqlite" else None
    return None if not name or name == ":memory:" or name.startswith("file:") else Path(name).absolute()


def _is_in_memory(url: str) -> bool:
    try:
        made = make_url(url)
    except ArgumentError:
        return False
    name = made.database or ""
    return made.get_backend_name() == "sqlite" and (
        name in ("", ":memory:") or "mode=memory" in url or ":memory:" in name
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _make_private(file: Path) -> None:
    """SQLite gives its other files the mode of this one."""
    with contextlib.suppress(OSError):  # it is there, or the store says why it cannot be
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _shown(url: str) -> str:
    """Without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "that --database-url names"
