"""httpx as everything here imports it: without a draw from the random generator that a script may have seeded.

httpx imports rich, which takes a number from `random` as it is imported. `tidegate.attach` imports httpx when it is
first called, which is after a script has seeded `random`: the numbers of the script would be others from then on.
"""

from __future__ import annotations

import random

_before = random.getstate()
import httpx as httpx  # noqa: E402

random.setstate(_before)
