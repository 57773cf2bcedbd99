"""The control daemon: keeps the desired knobs of every run, and tells Prometheus where the runs are."""
