"""Storage: tables, migrations, the state directory, and calls that do not block the event loop."""
