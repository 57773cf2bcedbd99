"""Database migrations with Alembic, one per version. The daemon itself runs them when it opens its database."""
