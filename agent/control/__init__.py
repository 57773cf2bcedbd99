"""Control of a run: `tidegate.attach`, the link to the daemon, agreement between ranks, and calls of the tuner between
steps."""
