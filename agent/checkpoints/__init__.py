"""Checkpoints on disk: manifests, writing (immediately or in the background), reading, inspection, locks of
directories."""
