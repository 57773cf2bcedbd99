"""Checkpoints: manifests, writing (at once or in the background), reading, inspection and locks of directories."""
