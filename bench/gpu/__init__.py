"""The stages of bench/gpu.sh: each prints one JSON object."""
