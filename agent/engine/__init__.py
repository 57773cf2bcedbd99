"""The engine: executes plans over lanes."""
