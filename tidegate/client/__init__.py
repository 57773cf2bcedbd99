"""The client of the daemon: finds the daemon, checks a proof of its identity, sends requests with deadlines."""
