"""The figures that both papers report, and the systems that they measured as plans on a rate card of their machines."""
