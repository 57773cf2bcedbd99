"""Devices: where weights and gradients live, behind one protocol of streams and events."""
