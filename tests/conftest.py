"""For all tests: examples of Hypothesis have no time limit of their own, for machines are shared."""

from hypothesis import settings

settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")
