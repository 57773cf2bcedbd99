"""Imports httpx without a change of the state of Python's random generator.

httpx imports rich, which takes a number from `random` during its import. `tidegate.attach` imports httpx when it is
first called, which is after a script has seeded `random`: the script would get other random numbers from then on.
"""

from __future__ import annotations

import random

_before = random.getstate()
import httpx as httpx  # noqa: E402

random.setstate(_before)
