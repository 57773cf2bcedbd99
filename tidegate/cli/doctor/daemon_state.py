"""`tidegate doctor --state`: finds rows of a daemon's database that cannot be read, and moves them to quarantine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.doctor.machine import Finding
from tidegate.errors import ConfigError, DaemonError

if TYPE_CHECKING:
    from tidegate.daemon.control.quarantine import Damaged
    from tidegate.daemon.storage.store import Store

SHOWN = 50
"""Maximum number of unreadable database rows that `tidegate doctor --state` lists."""


def examine_state(directory: Path) -> list[Finding]:
    """Moves the rows of a daemon's database that cannot be read to the table `quarantine`. Returns a finding for each
    row (at most SHOWN); if all rows can be read, one finding that says so.

    directory: the state directory of the daemon. While a daemon uses it, the rows are listed but not moved. ConfigError
    if there is no database.
    """
    from tidegate.daemon.configuration.settings import Settings
    from tidegate.daemon.storage.state_directory import exclusive
    from tidegate.daemon.storage.store import Store as Opened

    settings = Settings(state_dir=directory.expanduser().absolute())
    if not settings.database.is_file():
        raise ConfigError(
            f"There is no database of a daemon at {settings.database}: give the state directory of a daemon."
        )
    try:
        with exclusive(settings.home):
            return _check_rows(Opened(settings.url), settings.database, alone=True)
    except DaemonError as error:
        try:
            found = _check_rows(Opened(settings.url), settings.database, alone=False)
        except DaemonError as worse:
            return [Finding("state", "bad", str(worse))]
        bad = any(finding.verdict == "bad" for finding in found)
        return [*found, Finding("state", "bad" if bad else "missing", f"nothing was moved: {error}")]


def _check_rows(store: Store, database: Path, alone: bool) -> list[Finding]:
    """Findings for the database: errors that SQLite reports, and the rows that cannot be read (at most SHOWN).

    alone: no daemon uses the database, and the rows are moved to the table `quarantine`.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from tidegate.daemon.control import quarantine

    try:
        wrong = [Finding("state", "bad", f"{database}: SQLite says {line}") for line in quarantine.integrity(store)]
        found = quarantine.find(store)
        if found and alone:
            quarantine.move(store, found)
    except SQLAlchemyError as error:
        why = str(getattr(error, "orig", None) or error).splitlines()[0]
        remedy = "bring back a copy of before, or move the directory away to begin with an empty one"
        return [Finding("state", "bad", f"{database} is damaged ({why}): {remedy}")]
    finally:
        store.close()
    if not found:
        return wrong or [Finding("state", "good", f"every row of {database} can be read")]
    listed = [Finding("state", "bad", _sentence(row, alone)) for row in found[:SHOWN]]
    more = [Finding("state", "bad", f"and {len(found) - SHOWN:,} more")] if len(found) > SHOWN else []
    moved = f"moved to the table quarantine of {database}: {len(found):,} rows"
    return [*wrong, *listed, *more, *([Finding("state", "good", moved)] if alone else [])]


def _sentence(row: Damaged, alone: bool) -> str:
    key = ", ".join(repr(part) for part in row.key)
    return f"row {key} of {row.table} {'could not' if alone else 'cannot'} be read: {row.why}"
