"""Where the engine meets frameworks that move gradients themselves."""
