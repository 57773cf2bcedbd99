"""What the bench of predictions is made of: a training, configurations of it, errors, and their picture."""
