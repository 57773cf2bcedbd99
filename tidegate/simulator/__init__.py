"""The simulator: runs plans in virtual time, and predicts steps, bounds and the steady state of other knobs."""
