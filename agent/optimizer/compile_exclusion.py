"""Excludes the code of Tidegate from `torch.compile`, also where a script compiles its training step."""

from __future__ import annotations

import sys

_excluded_in: list[object] = []
"""The functions of Dynamo that were called with Tidegate's name, one at most."""


def exclude_from_compilation() -> None:
    """Puts Tidegate on the list of packages that Dynamo (the front end of `torch.compile`) does not trace: locks,
    clocks and threads have no meaning in a graph. torch imports Dynamo when an optimizer is built; does nothing where
    torch has not."""
    add = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None and add not in _excluded_in:
        add("tidegate")
        _excluded_in.append(add)
