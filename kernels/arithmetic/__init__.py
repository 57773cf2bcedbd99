"""Arithmetic of the update and of the norm, on CPU and GPU, and the reference implementation (`oracle`) that the
kernels must equal bit for bit."""
