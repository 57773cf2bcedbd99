"""Control: knob generations of each run (proposal, answers of the ranks, commit), trials of new knobs (canaries),
liveness of ranks, alerts and retention."""
