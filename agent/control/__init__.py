"""Control: `tidegate.attach`, the link to the daemon, the agreement of ranks, and the tuner at step boundaries."""
