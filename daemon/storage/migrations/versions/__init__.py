"""Alembic revisions, one file for each version of the tables. A released revision never changes."""
