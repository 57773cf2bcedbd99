"""The capacity planner: finds out whether a model fits on a machine, where its state lives, and which changes would
help."""
