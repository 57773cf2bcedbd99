"""Version 2: tokens get an expiry, a revocation and a run; generations get `canary` and `restores`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import inspect

revision = "v2"
down_revision = "v1"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("run", sa.String(300)))
    op.add_column("tokens", sa.Column("expires_at", sa.Float))
    op.add_column("tokens", sa.Column("revoked_at", sa.Float))
    op.add_column("generations", sa.Column("canary", sa.JSON))
    op.add_column("generations", sa.Column("restores", sa.Integer))
    if inspect(op.get_bind()).has_table("schema_version"):  # from before Alembic was used
        op.drop_table("schema_version")
    if op.get_bind().dialect.name == "sqlite":  # INSERT OR REPLACE deletes without firing the delete trigger
        op.execute(
            "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit "
            "WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
