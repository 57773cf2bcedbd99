"""Excludes the code of Tidegate from `torch.compile`, also where a script compiles its training step."""

from __future__ import annotations

import sys

_excluded_in: list[object] = []
"""Empty until Tidegate is excluded; then it holds the function of Dynamo that was called to exclude it, so that this
function is called only once."""


def exclude_from_compilation() -> None:
    """Excludes Tidegate from `torch.compile`: adds it to the packages that Dynamo, its front end, does not trace.
    Locks, clocks and threads have no meaning in a graph. Does nothing if Dynamo is not imported; torch imports it when
    an optimizer is built."""
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None and add not in _excluded_in:
        add("tidegate")
        _excluded_in.append(add)
