"""Version 1: tables of runs, generations, agents, audit rows and tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v1"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(300), nullable=False),
        sa.Column("scope", sa.String(300), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "generations",
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.String(300), nullable=False),
        sa.Column("knobs", sa.JSON, nullable=False),
        sa.Column("changes", sa.JSON, nullable=False),
        sa.Column("author", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("decided_at", sa.Float),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("votes", sa.JSON, nullable=False),
        sa.Column("applied", sa.JSON, nullable=False),
        sa.Column("effect", sa.JSON),
    )
    op.create_table(
        "agents",
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("agent", sa.String(300), nullable=False),
        sa.Column("hello", sa.JSON, nullable=False),
        sa.Column("liveness", sa.String(300), nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("applied_generation", sa.Integer, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("timestamp", sa.Float, nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("action", sa.String(300), nullable=False),
        sa.Column("run", sa.String(300), nullable=False),
        sa.Column("generation", sa.Integer),
        sa.Column("before", sa.JSON, nullable=False),
        sa.Column("after", sa.JSON, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("effect", sa.Text, nullable=False),
    )
    op.create_index("audit_by_run", "audit", ["run", "id"])
    _refuse_changes_of_the_audit_log()


def _refuse_changes_of_the_audit_log() -> None:
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
            )
    elif dialect == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
        )
