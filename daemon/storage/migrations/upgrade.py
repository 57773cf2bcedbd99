"""Brings a database to the version that this Tidegate knows."""

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
    """Makes or changes the tables in one transaction, while others who open the same SQLite database wait for it.

    DaemonError when the database is of a newer Tidegate. if_new: is raised where it has no tables yet.
    """
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon.storage:migrations")
    known = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        found = MigrationContext.configure(connection).get_current_revision()
        head = known.get_current_head()
        before = found is None and inspect(connection).has_table("schema_version")
        if found is None and not before and if_new is not None:
            raise if_new
        if before:
            _check_before_alembic(connection)
            command.stamp(config, FIRST)
        elif found not in {None, *(revision.revision for revision in known.walk_revisions())}:
            raise DaemonError(
                f"The database is of version {found}, this Tidegate knows up to {head}: install a newer Tidegate."
            )
        if found != head:
            command.upgrade(config, "head")


def _check_before_alembic(connection: Connection) -> None:
    """The tables of version 1 were made without Alembic and noted their version in a table of their own."""
    found = connection.exec_driver_sql("SELECT max(version) FROM schema_version").scalar()
    if found != 1:
        raise DaemonError(f"The database is of version {found}, this Tidegate knows none such: install a newer one.")
