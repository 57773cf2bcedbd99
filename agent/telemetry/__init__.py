"""What the agent says about itself: phases, steps, metrics."""
