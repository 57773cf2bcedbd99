"""The runs and ranks that attachments of this process hold, and their goodbye when the process ends."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import weakref
from typing import Protocol

from tidegate.agent.control.daemon_link import wait_for_goodbyes
from tidegate.logs import event

log = logging.getLogger("tidegate")


class Seated(Protocol):
    """An attachment, as one of its rank of its run in this process."""

    run: str
    rank: int

    def close(self) -> None: ...

    def leave(self) -> None:
        """Says goodbye with the last steps, without waiting for the daemon."""


_seated: weakref.WeakValueDictionary[tuple[str, int], Seated] = weakref.WeakValueDictionary()
_says_goodbye: set[int] = set()
"""Processes, this one and its parents, that have the hook."""


def vacate(run: str, rank: int) -> None:
    """Closes the attachment that this process has for this rank of the run: the one that comes takes its place."""
    earlier = _seated.pop((run, rank), None)
    if earlier is not None:
        log.warning(
            "run %s, rank %d: this process had attached an optimizer under this name before; that one is detached, and "
            "trains on unseen if it still does. Give each run a name of its own.", run, rank,
            extra=event("replaced", run=run, rank=rank),
        )  # fmt: skip
        earlier.close()


def seat(attachment: Seated) -> None:
    """It holds its rank of its run until it is vacated, closed or collected; at the end of the process it leaves."""
    _seated[attachment.run, attachment.rank] = attachment
    if os.getpid() not in _says_goodbye:
        if not _says_goodbye:  # a fork has it from its parent
            atexit.register(_leave_all)
        # Children of multiprocessing end without `atexit`, and forget what their parent had registered here.
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=0)
        _says_goodbye.add(os.getpid())


def unseat(attachment: Seated) -> None:
    """It was closed."""
    if _seated.get((attachment.run, attachment.rank)) is attachment:
        del _seated[attachment.run, attachment.rank]


def _leave_all() -> None:
    """No signal handler: SIGTERM comes here where the program turns it into an exit."""
    for attachment in tuple(_seated.values()):
        try:
            attachment.leave()
        except Exception:
            log.exception("a run could not say goodbye")
    wait_for_goodbyes()
