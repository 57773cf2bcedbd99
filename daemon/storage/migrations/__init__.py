"""How the tables came to be, version by version: Alembic, run by the daemon itself when it opens its database."""
