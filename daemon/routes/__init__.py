"""HTTP routes of the daemon's API, one module for each resource."""
