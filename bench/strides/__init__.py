"""What the benches of strides share: a training of any size whose backward takes as long as one says, and intervals."""
