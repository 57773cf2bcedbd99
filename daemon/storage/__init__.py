"""Storage: database tables, migrations, the state directory, and store calls that do not block the event loop."""
