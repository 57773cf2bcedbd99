"""The in-process agent: the offload engine and what it says about itself."""
