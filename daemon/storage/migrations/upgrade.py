"""Upgrades a database to the newest version of the schema that this Tidegate knows."""

from __future__ import annotations

from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.engine import Connection, Engine

from tidegate.errors import DaemonError

FIRST: Final = "v1"


def upgrade(engine: Engine, if_new: DaemonError | None = None) -> None:
    """Creates or changes the tables in one transaction; other processes that open the same SQLite database wait for it.

    DaemonError when the database was written by a newer Tidegate. if_new: the error to raise if it has no tables yet.
    """
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon.storage:migrations")
    known = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        current = MigrationContext.configure(connection).get_current_revision()
        head = known.get_current_head()
        before_alembic = current is None and inspect(connection).has_table("schema_version")
        if current is None and not before_alembic and if_new is not None:
            raise if_new
        if before_alembic:
            _check_before_alembic(connection)
            command.stamp(config, FIRST)
        elif current not in {None, *(revision.revision for revision in known.walk_revisions())}:
            raise DaemonError(
                f"The database is of version {current}, this Tidegate knows up to {head}: install a newer Tidegate."
            )
        if current != head:
            command.upgrade(config, "head")


def _check_before_alembic(connection: Connection) -> None:
    """DaemonError unless the database is of version 1.

    The tables of version 1 were made before Tidegate used Alembic; their version is in the table `schema_version`.
    """
    version = connection.exec_driver_sql("SELECT max(version) FROM schema_version").scalar()
    if version != 1:
        raise DaemonError(
            f"The database is of version {version}, this Tidegate knows no such version: install a newer one."
        )
