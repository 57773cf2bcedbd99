"""Control of a run: `tidegate.attach`, the link to the daemon, agreement between ranks, the tuner between steps."""
