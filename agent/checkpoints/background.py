"""Background part of a checkpoint: copies the held state while training continues, then publishes the checkpoint.

One thread copies chunk by chunk. It starts no chunk while an update runs, because the lanes then need paths, memory and
cores. It is not a daemon thread: the process does not exit before this thread has ended. Errors are reported, and the
previous checkpoint is kept.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from tidegate.agent.checkpoints.checkpoint import Checkpoint
from tidegate.agent.checkpoints.manifest import Manifest
from tidegate.agent.checkpoints.publication import publish, sync
from tidegate.agent.checkpoints.saved_files import checksums_of
from tidegate.agent.checkpoints.snapshot import BeforeChunk, StateSource, buffer_bytes, write_state
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.state_file import padded_bytes
from tidegate.errors import CheckpointFailed, EngineError
from tidegate.kernels import IoPool, aligned_buffer

log = logging.getLogger("tidegate.tiers")

THREADS: Final = 2
"""Number of blocks transferred at once: enough for the speed of a drive, and few enough not to disturb a forward
pass."""
POLL_SECONDS: Final = 0.01
"""Interval at which the thread checks whether the update is over."""
LOG_INTERVAL_SECONDS: Final = 10.0
"""Interval at which progress is logged."""


@dataclass(frozen=True, slots=True)
class UnpublishedPart:
    """One rank's part of a checkpoint before it is published. `pending`: the state that is not written yet, as pairs of
    a snapshot and the file to which it will be written. All other files exist, except the manifest."""

    directory: Path
    manifest: Manifest
    pending: Sequence[tuple[StateSource, Path]] = ()

    def publish(self, before_chunk: BeforeChunk = lambda _: None) -> Checkpoint:
        """Publishes this part: writes its complete folder to stable storage (fsync), then the manifest. From then on
        this part of the checkpoint exists. The user's files are read for their checksums; `before_chunk` is called
        before each chunk that is read."""
        sync_all(self.folder)
        manifest = replace(self.manifest, files=checksums_of(self.folder, self.manifest.own_files, before_chunk))
        publish(self.directory, manifest)
        return Checkpoint(self.directory, manifest)

    @property
    def folder(self) -> Path:
        """Folder with this rank's files."""
        return self.directory / self.manifest.folder

    def release(self) -> None:
        """Closes all snapshots of state in `pending`."""
        for state, _ in self.pending:
            state.close()


def remove_part(folder: Path) -> None:
    """Removes a rank's part of a checkpoint that will not be complete."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


class _DroppedError(Exception):
    """Raised in the thread when the checkpoint is given up (dropped) before it is complete."""


@dataclass
class _Progress:
    """Progress of the copy, for the log. Times in seconds on the monotonic clock."""

    written_bytes: int = 0
    paused_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)


class PendingCheckpoint:
    """Checkpoint whose remaining state is copied while training continues. `AdamW.begin_checkpoint` returns it.

    directory: directory of the checkpoint.
    total_bytes: bytes of this rank's state to copy in the background.
    """

    def __init__(
        self,
        part: UnpublishedPart,
        updating: Callable[[], bool],
        on_complete: Callable[[Checkpoint], None],
        ranks: Ranks,
    ) -> None:
        """`part`: this rank's part of the checkpoint, with the state that is still to be copied. `updating`: returns
        whether an update is running. `ranks`: all ranks, which agree on the result. `on_complete`: called when the
        checkpoint is complete; with several ranks that is known after the agreement in `wait_and_agree`. The thread
        does not run before `start`."""
        self.directory = part.directory
        self.total_bytes = sum(padded_bytes(state.header.data_bytes) for state, _ in part.pending)
        self._part, self._updating, self._on_complete, self._ranks = part, updating, on_complete, ranks
        self._progress = _Progress()
        self._published: Checkpoint | None = None
        self._failure: BaseException | None = None
        self._failure_raised = False
        self._agreed = False
        self._dropped = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()

    @classmethod
    def already_complete(cls, published: Checkpoint) -> Self:
        """Creates the object for the checkpoint `published`, which is complete already because no state had
        to be copied in the background."""
        part = UnpublishedPart(published.directory, published.manifest)
        pending = cls(part, lambda: False, lambda _: None, Ranks())
        pending._published, pending._agreed = published, True
        pending._ended.set()
        return pending

    def start(self) -> None:
        """Starts the thread that copies the remaining state. From now on this thread publishes the part, or removes it
        after a failure."""
        log.info(
            "checkpoint %s: a thread copies %s bytes while training continues", self.directory, f"{self.total_bytes:,}"
        )
        threading.Thread(target=self._drain, name="tidegate-drain", daemon=False).start()

    # ---- for users

    def done(self) -> bool:
        """Whether the background work of this rank has ended, with success or failure."""
        return self._ended.is_set()

    @property
    def copied_bytes(self) -> int:
        """Bytes written so far, out of `total_bytes`."""
        return self._progress.written_bytes

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Waits until this rank's part is on stable storage. With one rank the checkpoint is then complete; with
        several ranks it is complete when all ranks have written their parts.

        Raises TimeoutError after `timeout` seconds; CheckpointFailed when the part could not be written, with older
        checkpoints unchanged; EngineError in a child process, which cannot see the writing thread.
        """
        if not self.done() and os.getpid() != self._pid:
            raise EngineError(f"{self.directory} is written by the parent process: wait for it there, not in a child.")
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"{self.directory} is not complete after {timeout:g} s: {self.copied_bytes:,} of "
                f"{self.total_bytes:,} bytes are copied. The copy goes on in the background: wait longer."
            )
        if self._failure is not None:
            self._failure_raised = True
            raise self._failure
        assert self._published is not None, "the thread ended without a failure"
        return self._published

    def __repr__(self) -> str:
        state = "failed" if self._failure else "complete" if self.done() else "pending"
        return f"PendingCheckpoint({self.directory}, {state}, {self.copied_bytes:,} of {self.total_bytes:,} bytes)"

    # ---- for the optimizer

    def raise_if_failed_alone(self) -> None:
        """Calls `raise_if_failed` if there is only one rank. With several ranks, an error on one of them would leave
        the others waiting in a collective, so errors are raised on all ranks by `wait_and_agree`."""
        if self._ranks.count == 1:
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raises CheckpointFailed if the checkpoint failed and the error was not raised before."""
        if self._failure is not None and self.done() and not self._failure_raised:
            self.result()

    def wait_and_agree(self) -> None:
        """Waits until all ranks have written their parts or failed, and agrees on the result. A collective call of all
        ranks. Raises CheckpointFailed on all ranks when the checkpoint is not complete; with one rank, only if the
        error was not raised before."""
        self._ended.wait()
        if not self._agreed:
            self._agreed = True
            complete = self._ranks.all_true(self._failure is None)
            if not complete and self._ranks.count > 1:  # raised before or not: all ranks behave the same
                self._failure_raised = True
                raise self._failure or CheckpointFailed(
                    f"Another rank could not write its part of {self.directory}, which stays incomplete. The error of "
                    "that rank says why. Older checkpoints are unchanged."
                )
            if self._published is not None and self._ranks.count > 1:
                self._remove_expired(self._published)
        self.raise_if_failed()

    def finish(self) -> None:
        """Waits for this rank's part, with a log message. If an exception interrupts the wait, the checkpoint is given
        up."""
        if os.getpid() != self._pid or self.done():
            return
        log.info("the process waits for checkpoint %s: %s", self.directory, self._progress_text())
        try:
            self._ended.wait()
        except BaseException:
            self._dropped.set()
            raise

    # ---- the thread

    def _drain(self) -> None:
        """Body of the thread: copies, publishes, and stores the result or the failure."""
        try:
            self._copy()
            published = self._part.publish(self._before_chunk)
        except BaseException as error:
            remove_part(self._part.folder)
            why = "it was dropped" if isinstance(error, _DroppedError) else f"{type(error).__name__}: {error}"
            self._failure = CheckpointFailed(
                f"Checkpoint {self.directory} was not completed in the background: {why.removesuffix('.')}. Older "
                "checkpoints are unchanged."
            )
            self._failure.__cause__ = error
            log.error("%s", self._failure)
        else:
            self._complete(published)
        finally:
            self._part.release()
            self._ended.set()

    def _copy(self) -> None:
        """Writes all pending state."""
        most = max((buffer_bytes(state) for state, _ in self._part.pending), default=0)
        buffer = aligned_buffer(most) if most else None
        address = 0 if buffer is None else buffer.ctypes.data
        with IoPool(THREADS) as pool:
            for state, target in self._part.pending:
                write_state(pool, state, target, address, self._before_chunk)
                state.close()

    def _complete(self, published: Checkpoint) -> None:
        """Makes `published` the result of this object, and logs that. With one rank, also calls `on_complete`."""
        self._published = published
        log.info("checkpoint %s is complete: %s", self.directory, self._progress_text())
        if self._ranks.count == 1:
            self._remove_expired(published)

    def _before_chunk(self, nbytes: int) -> None:
        """Called before each chunk of `nbytes`: waits while an update runs. Raises _DroppedError if the checkpoint was
        given up."""
        began = time.monotonic()
        # When the main thread has ended, `updating` is ignored: a lane may be stuck, and the process must still end.
        while self._updating() and threading.main_thread().is_alive() and not self._dropped.wait(POLL_SECONDS):
            pass
        if self._dropped.is_set():
            raise _DroppedError
        now, progress = time.monotonic(), self._progress
        progress.paused_seconds += now - began
        if now - progress.logged > LOG_INTERVAL_SECONDS:
            progress.logged = now
            log.info("checkpoint %s: %s", self.directory, self._progress_text())
        progress.written_bytes += nbytes

    def _progress_text(self) -> str:
        progress, seconds = self._progress, time.monotonic() - self._progress.began
        return (
            f"{progress.written_bytes:,} of {self.total_bytes:,} bytes in {seconds:.1f} s, "
            f"{progress.paused_seconds:.1f} s of them waiting for updates"
        )

    def _remove_expired(self, published: Checkpoint) -> None:
        """Calls `on_complete`, which deletes expired checkpoints; errors are logged."""
        try:
            self._on_complete(published)
        except Exception as error:
            warn_not_removed(self.directory, error)


def warn_not_removed(complete: Path, error: Exception) -> None:
    """Warns that older checkpoints could not be removed; the new one is complete."""
    why = str(error) or type(error).__name__
    log.warning("checkpoint %s is complete, but older ones cannot be removed: %s", complete, why)


def sync_all(folder: Path) -> None:
    """Synchronises all files and directories below `folder` to stable storage, files of the user's `save_also`
    included."""
    for at, _, names in os.walk(folder):
        for name in names:
            sync(Path(at, name))
        sync(Path(at))
    sync(folder.parent)
