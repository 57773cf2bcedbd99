"""Configuration of the daemon: its settings and its TLS certificate."""
