"""Version 3: table of steps, so that the steps and each agent's first step with a generation survive a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v3"
down_revision = "v2"


def upgrade() -> None:
    op.create_table(
        "steps",
        sa.Column("agent", sa.String(64), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("steps_by_time", "steps", ["at"])
