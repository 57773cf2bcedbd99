"""Gradients: when they are ready, whether they changed after a copy, and their accumulation in host memory."""
