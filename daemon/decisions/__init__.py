"""Decisions as pure functions: the life of knob generations, canaries, and the measured effect of a change."""
