"""What a rank told last, so that a run that ended is shown in full after a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v4"
down_revision = "v3"


def upgrade() -> None:
    op.add_column("agents", sa.Column("told", sa.JSON))
