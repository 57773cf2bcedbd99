"""Version 7: how a run broke down, so that it is shown after a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v7"
down_revision = "v6"


def upgrade() -> None:
    op.add_column("runs", sa.Column("breakdown", sa.JSON))
