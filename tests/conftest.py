"""For all tests: which examples Hypothesis tries.

The same ones on every run, so that a change is judged by what it changed; `--hypothesis-profile random` looks for new
ones. None has a time limit of its own, for machines are shared.
"""

from hypothesis import settings

settings.register_profile("random", deadline=None)
settings.register_profile("tidegate", deadline=None, derandomize=True)
settings.load_profile("tidegate")
