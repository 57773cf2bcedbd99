"""The engine: makes a plan for each step, executes it on lanes, and manages the memory of the optimizer state."""
