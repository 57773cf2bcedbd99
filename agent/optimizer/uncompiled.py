"""What `torch.compile` meets of Tidegate in a step that a script compiles is left as it is."""

from __future__ import annotations

import sys

_told: list[object] = []
"""The functions of Dynamo that know it, one at most."""


def leave_uncompiled() -> None:
    """Puts Tidegate on the list of packages that Dynamo does not trace into: locks, clocks and threads mean nothing in
    a graph. torch imports Dynamo when an optimizer is built; where it has not, there is nothing to be told."""
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None and add not in _told:
        add("tidegate")
        _told.append(add)
