"""Control: knob generations of each run (proposal, vote, commit), liveness of ranks, trials, alerts and retention."""
