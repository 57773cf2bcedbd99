"""Registry of this process's attachments by run and rank. When the process ends, it sends their final reports and
goodbye messages to the daemon, and says whether an exception has ended the process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import re
import sys
import weakref
from typing import Final, Protocol

from tidegate.agent.control.daemon_link import wait_for_goodbyes
from tidegate.logs import event

log = logging.getLogger("tidegate")


class RegisteredAttachment(Protocol):
    """Interface of an attachment in this registry. It represents one rank of a run in this process."""

    run: str
    rank: int

    def close(self) -> None: ...

    def leave(self, error: str) -> None:
        """Queues the final report and the goodbye message, without waiting for the daemon. `error`: what
        `error_name` returns."""


_MAX_NAME: Final = 64
_attachments: weakref.WeakValueDictionary[tuple[str, int], RegisteredAttachment] = weakref.WeakValueDictionary()
_hooked_processes: set[int] = set()
"""Process ids in which `_leave_all` is registered to run at process end: those of this process and of parents that it
was forked from."""


def error_name(error: BaseException | None) -> str:
    """Name of the type of an exception by which a training fails; the daemon gets nothing else of the exception. Empty
    for exceptions by which nothing fails (Ctrl-C, the end of an iterator, an exit with code 0), and in an interactive
    interpreter, which goes on after an exception. For `sys.exit(1)` in an exception handler: the handled exception."""
    while isinstance(error, SystemExit) and error.code and error.__context__ is not None:
        error = error.__context__
    if hasattr(sys, "ps1") or isinstance(error, (StopIteration, StopAsyncIteration)):
        return ""
    fails = isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))
    return re.sub(r"\W", "_", type(error).__name__, flags=re.ASCII)[:_MAX_NAME] if fails else ""


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
    handler: after SIGTERM this runs only if the program turns the signal into a normal exit.

    The exception that ends the process is in `sys.last_value`; in a child process of multiprocessing it is still being
    handled. Python does not keep a SystemExit of the main process."""
    error = error_name(sys.exc_info()[1] or getattr(sys, "last_value", None))
    for attachment in tuple(_attachments.values()):
        try:
            attachment.leave(error)
        except Exception:
            log.exception("the final report and the goodbye message of a run could not be sent to the daemon")
    wait_for_goodbyes()
