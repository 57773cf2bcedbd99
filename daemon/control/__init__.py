"""Control: the life of knob generations and of the ranks that must agree to them."""
