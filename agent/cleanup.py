"""Runs all clean-up steps even if one of them fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tidegate")


def close_all(*steps: Callable[[], object]) -> None:
    """Calls each of `steps`, in this order, even if others fail. Then raises the first error; later errors are only
    logged, because they usually have the same cause."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            if first is None:
                first = error
            else:
                log.warning(
                    "Another clean-up step failed as well (the first error is raised): %s: %s",
                    type(error).__name__,
                    error,
                )
    if first is not None:
        raise first
