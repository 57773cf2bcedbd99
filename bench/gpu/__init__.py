"""The stages of bench/gpu.sh. Each stage is a module that prints one JSON object."""
