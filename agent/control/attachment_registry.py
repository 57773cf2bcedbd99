"""Registry of this process's attachments by run and rank. When the process ends, it sends their final reports and
goodbye messages to the daemon."""

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


class RegisteredAttachment(Protocol):
    """Interface of an attachment in this registry. It represents one rank of a run in this process."""

    run: str
    rank: int

    def close(self) -> None: ...

    def leave(self) -> None:
        """Queues the final report and the goodbye message, without waiting for the daemon."""


_attachments: weakref.WeakValueDictionary[tuple[str, int], RegisteredAttachment] = weakref.WeakValueDictionary()
_hooked_processes: set[int] = set()
"""Process ids in which `_leave_all` is registered to run at process end: those of this process and of parents that it
was forked from."""


def close_existing(run: str, rank: int) -> None:
    """Closes this process's attachment for this run and rank, if any, before a new one replaces it."""
    earlier = _attachments.pop((run, rank), None)
    if earlier is not None:
        log.warning(
            "run %s, rank %d: this process had attached another optimizer under this name; that optimizer is now "
            "detached, and its training continues without telemetry. Give each run a name of its own.", run, rank,
            extra=event("replaced", run=run, rank=rank),
        )  # fmt: skip
        earlier.close()


def register(attachment: RegisteredAttachment) -> None:
    """Registers an attachment until it is replaced, closed or garbage-collected. If it is still registered when the
    process ends, its final report and goodbye message are sent."""
    _attachments[attachment.run, attachment.rank] = attachment
    if os.getpid() not in _hooked_processes:
        if not _hooked_processes:  # a forked child inherits the hook of `atexit`
            atexit.register(_leave_all)
        # Child processes of multiprocessing run no `atexit` hooks, and drop the finalizers that their parent
        # registered.
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=0)
        _hooked_processes.add(os.getpid())


def unregister(attachment: RegisteredAttachment) -> None:
    """Removes an attachment that was closed."""
    if _attachments.get((attachment.run, attachment.rank)) is attachment:
        del _attachments[attachment.run, attachment.rank]


def _leave_all() -> None:
    """Sends the final reports and goodbye messages of all attachments when the process ends. There is no signal
    handler: after SIGTERM this runs only if the program turns the signal into a normal exit."""
    for attachment in tuple(_attachments.values()):
        try:
            attachment.leave()
        except Exception:
            log.exception("the final report and the goodbye message of a run could not be sent to the daemon")
    wait_for_goodbyes()
