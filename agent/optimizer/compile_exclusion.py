"""Excludes the code of Tidegate from `torch.compile`, also where a script compiles its training step."""

from __future__ import annotations

import sys

_excluded_in: list[object] = []
"""The function of Dynamo with which Tidegate was excluded, so that it is called only once; empty before that."""


def exclude_from_compilation() -> None:
    """Excludes Tidegate from `torch.compile`: adds it to the packages that Dynamo, its front end, does not trace.
    Locks, clocks and threads have no meaning in a graph. Does nothing if Dynamo is not imported; torch imports it when
    an optimizer is built."""
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None and add not in _excluded_in:
        add("tidegate")
        _excluded_in.append(add)
