"""The figures that both papers report, and models of the measured systems as plans for the papers' machines."""
