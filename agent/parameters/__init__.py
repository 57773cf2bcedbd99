"""Parameters of the optimizer: subgroups, shards, ownership, and detection of changed or moved parameters."""
