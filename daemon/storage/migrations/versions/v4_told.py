"""Version 4: the last report of each rank, so that a run that has ended is shown in full after a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v4"
down_revision = "v3"


def upgrade() -> None:
    op.add_column("agents", sa.Column("told", sa.JSON))
