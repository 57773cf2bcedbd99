"""Storage paths: the files that hold state, who may use a path when, and what a run leaves on it."""
