"""Calibration: measures how fast this machine copies, updates, reads and writes."""
