"""Prometheus metrics: their families, the catalogue of all of them, and the page that documents them."""
