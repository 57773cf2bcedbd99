"""The control daemon: stores the desired knobs of every run, and serves Prometheus service discovery of the ranks."""
