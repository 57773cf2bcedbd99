"""`tidegate.AdamW`: the optimizer, its settings, state dicts, and its overlap with the forward pass."""
