"""Gradients: when they are ready, whether they changed after a copy, and sums of micro-batches."""
