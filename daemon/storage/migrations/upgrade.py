"""Upgrades a database to the newest version of the schema that this Tidegate knows."""

from __future__ import annotations

from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.engine import Connection, Engine

from tidegate.daemon.storage.schema import Base
from tidegate.errors import DaemonError

FIRST: Final = "v1"
VERSIONS: Final = "alembic_version"


def upgrade(engine: Engine, if_new: DaemonError | None = None) -> None:
    """Creates or changes the tables in one transaction; other processes that open the same SQLite database wait for it.

    DaemonError when the database was written by a newer Tidegate. if_new: the error to raise if it has no tables yet.
    """
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon.storage:migrations")
    known = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        found = _revision(connection)
        head = known.get_current_head()
        before = found is None and inspect(connection).has_table("schema_version")
        if found is None and not before:
            _check_empty(connection)
            if if_new is not None:
                raise if_new
        if before:
            _check_before_alembic(connection)
            command.stamp(config, FIRST)
        elif found not in {None, *(revision.revision for revision in known.walk_revisions())}:
            raise DaemonError(
                f"The database has version {found}, which this Tidegate does not know (its newest is {head}): install "
                "a newer Tidegate."
            )
        if found != head:
            command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    """The version of the database; None if it has no table of versions, or that table is empty."""
    found = MigrationContext.configure(connection).get_current_heads()
    if len(found) > 1:
        versions = ", ".join(sorted(found))[:100]
        raise DaemonError(
            f"The database states {len(found)} versions ({versions}), but its table {VERSIONS} must have one row: "
            "restore a backup, or delete the wrong rows."
        )
    return found[0] if found else None


def _check_empty(connection: Connection) -> None:
    """DaemonError if the database has tables with the names of the daemon's tables, but no version. It is unknown which
    version made them, so they are not changed."""
    there = sorted(set(inspect(connection).get_table_names()) & Base.metadata.tables.keys())
    if there:
        raise DaemonError(
            f"The database has tables ({', '.join(there)[:200]}), but their version is unknown, because {VERSIONS} is "
            "missing or empty: restore a backup, or choose another --database-url."
        )


def _check_before_alembic(connection: Connection) -> None:
    """DaemonError unless the database is of version 1.

    The tables of version 1 were made before Tidegate used Alembic; their version is in the table `schema_version`.
    """
    version = connection.exec_driver_sql("SELECT max(version) FROM schema_version").scalar()
    if version != 1:
        raise DaemonError(
            f"The database has version {version}, which this Tidegate does not know: install a newer one."
        )
