"""Version 5: table of counters that never decrease, even if the clock is set back; quarantine for unreadable rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v5"
down_revision = "v4"


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("next", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "quarantine",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
