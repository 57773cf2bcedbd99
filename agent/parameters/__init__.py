"""Parameters of the optimizer: subgroups, shards, owners, and what tells that a parameter has changed."""
