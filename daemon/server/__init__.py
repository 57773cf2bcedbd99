"""The server: application, HTTP protocol, start and end of the daemon, and its own metrics."""
