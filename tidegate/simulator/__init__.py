"""The simulator: runs plans in virtual time. For given knobs it predicts the time of a step, its lower bound, and the
steady state that repeated steps reach."""
