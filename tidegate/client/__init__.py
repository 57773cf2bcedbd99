"""The client of the daemon: finding it, proving who it is, and HTTP with deadlines."""
