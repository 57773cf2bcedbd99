"""The server: ASGI application, HTTP protocol, start and shutdown of the daemon process, and the daemon's metrics."""
