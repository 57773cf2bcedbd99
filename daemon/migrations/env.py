"""What Alembic runs: the revisions that are missing, on the connection that the daemon hands over."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
# SQLite can undo DDL; Alembic believes that it cannot.
transactional = True if connection.dialect.name == "sqlite" else None
context.configure(connection=connection, render_as_batch=True, transactional_ddl=transactional)
with context.begin_transaction():
    context.run_migrations()
