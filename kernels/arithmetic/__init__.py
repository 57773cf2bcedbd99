"""Arithmetic: the update and the norm on CPU and GPU, and the oracle that all of them must equal bit for bit."""
