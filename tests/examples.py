"""How many examples a property test tries: few in `make test`, many in `make test-all`.

Profiles of Hypothesis (`--hypothesis-profile`): `quick` is the default, `thorough` is what `make test-all` takes. Both
try the same examples on every run, so that a change is judged by what it changed; `random` looks for new ones. None has
a time limit for an example, for machines are shared.
"""

from __future__ import annotations

import math

from hypothesis import settings

USUAL = 100
"""Of a profile under which `examples(n)` is n."""


def register_profiles() -> None:
    settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
    settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=2 * USUAL)
    settings.register_profile("random", deadline=None, max_examples=USUAL)
    settings.load_profile("quick")


def examples(usual: int) -> int:
    """The number of examples for `@settings(max_examples=...)`: `usual`, scaled to the profile that is loaded."""
    return math.ceil(usual * settings().max_examples / USUAL)
