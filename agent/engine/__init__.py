"""The engine: plans each step and executes plans on lanes; the memory of the optimizer state."""
