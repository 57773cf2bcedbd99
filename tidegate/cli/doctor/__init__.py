"""`tidegate doctor`: checks of the machine, the GPU, storage paths, checkpoints and a daemon's state."""
