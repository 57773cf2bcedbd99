"""The capacity planner: whether a model trains on a machine, where its state lives, and what would help."""
