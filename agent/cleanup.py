"""Clean-up of which no part may be left out because another one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tidegate")


def close_all(*steps: Callable[[], object]) -> None:
    """Takes each of `steps`, in this order, whatever becomes of the others. Then raises what the first one that failed
    has raised; the errors of the others are logged, as one error often brings all of them about."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            if first is None:
                first = error
            else:
                log.warning("Clean-up failed once more: %s: %s", type(error).__name__, error)
    if first is not None:
        raise first
