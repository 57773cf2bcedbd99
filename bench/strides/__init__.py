"""Common parts of the benches of strides: a training of any size, whose backward takes a given time, and intervals."""
