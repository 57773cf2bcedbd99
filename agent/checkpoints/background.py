"""Writes the rest of a checkpoint while training goes on: what was held is copied, then the checkpoint exists.

One thread copies chunk after chunk, and begins none while an update runs: then lanes need paths, memory and cores. It
is no daemon: a process that ends waits for it. What it cannot write is told, and the checkpoint before stays.
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

from tidegate.agent.checkpoints.manifest import Checkpoint, Manifest, publish, sync
from tidegate.agent.checkpoints.saved_files import checksums_of
from tidegate.agent.checkpoints.snapshot import Pace, State, buffer_bytes, write_state
from tidegate.agent.ranks import Ranks
from tidegate.agent.tiers.state_file import padded_bytes
from tidegate.errors import CheckpointFailed, EngineError
from tidegate.kernels import IoPool, aligned_buffer

log = logging.getLogger("tidegate.tiers")

THREADS: Final = 2
"""Blocks under way at once: enough for a drive, and few beside a forward pass."""
LOOK_SECONDS: Final = 0.01
"""How often it is looked whether the update is over."""
SAY_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a checkpoint that is not complete: its folder is there, `pending` is not in it yet."""

    directory: Path
    manifest: Manifest
    pending: Sequence[tuple[State, Path]] = ()

    def publish(self, pace: Pace = lambda _: None) -> Checkpoint:
        """All is in it: it is made durable, and exists from then on. `pace` is called before each chunk of the user's
        files that is read, for their checksums."""
        sync_all(self.folder)
        manifest = replace(self.manifest, files=checksums_of(self.folder, self.manifest.own_files, pace))
        publish(self.directory, manifest)
        return Checkpoint(self.directory, manifest)

    @property
    def folder(self) -> Path:
        return self.directory / self.manifest.folder

    def let_go(self) -> None:
        for state, _ in self.pending:
            state.close()


def abandon(folder: Path) -> None:
    """Removes a rank's part of a checkpoint that will not be complete."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


class _DroppedError(Exception):
    pass


@dataclass
class _Progress:
    written_bytes: int = 0
    paused_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)


class PendingCheckpoint:
    """A checkpoint whose rest is written while training goes on. `AdamW.begin_checkpoint` makes it.

    directory: where it will be. total_bytes: what has to be copied after training went on, of this rank.
    """

    def __init__(
        self, part: Part, updating: Callable[[], bool], on_complete: Callable[[Checkpoint], None], ranks: Ranks
    ) -> None:
        """Begins. `updating`: whether an update runs. `on_complete`: called when it is complete; with several ranks,
        when they meet in `settle`."""
        self.directory = part.directory
        self.total_bytes = sum(padded_bytes(state.kind.data_bytes) for state, _ in part.pending)
        self._part, self._updating, self._on_complete, self._ranks = part, updating, on_complete, ranks
        self._progress = _Progress()
        self._made: Checkpoint | None = None
        self._failure: BaseException | None = None
        self._told = False
        self._agreed = False
        self._dropped = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()

    @classmethod
    def complete(cls, made: Checkpoint) -> Self:
        """One that had nothing to drain."""
        pending = cls(Part(made.directory, made.manifest), lambda: False, lambda _: None, Ranks())
        pending._made, pending._agreed = made, True
        pending._ended.set()
        return pending

    def start(self) -> None:
        """From here on the thread has it."""
        log.info("checkpoint %s: %s bytes are drained while training goes on", self.directory, f"{self.total_bytes:,}")
        threading.Thread(target=self._drain, name="tidegate-drain", daemon=False).start()

    # ---- for users

    def done(self) -> bool:
        """Whether nothing more happens to it: it is complete, or failed."""
        return self._ended.is_set()

    @property
    def copied_bytes(self) -> int:
        """So much of `total_bytes` is written."""
        return self._progress.written_bytes

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Waits until this rank's part is on the disk. TimeoutError after `timeout` seconds; CheckpointFailed when it
        could not be written: older checkpoints are then as they were.

        With one rank it is complete then; of several, when the last one is.
        """
        if not self.done() and os.getpid() != self._pid:
            raise EngineError(f"{self.directory} is written by the parent process; a forked child cannot wait for it.")
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"{self.directory} is not complete after {timeout:g} s: {self.copied_bytes:,} of "
                f"{self.total_bytes:,} bytes are copied."
            )
        if self._failure is not None:
            self._told = True
            raise self._failure
        assert self._made is not None, "it ended"
        return self._made

    def __repr__(self) -> str:
        state = "failed" if self._failure else "complete" if self.done() else "pending"
        return f"PendingCheckpoint({self.directory}, {state}, {self.copied_bytes:,} of {self.total_bytes:,} bytes)"

    # ---- for the optimizer

    def raise_if_failed_alone(self) -> None:
        """As `raise_if_failed`, with one rank. With several, one that raised would leave the others in a collective:
        they agree in `settle`."""
        if self._ranks.count == 1:
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """CheckpointFailed, once, when it failed and nobody was told."""
        if self._failure is not None and self.done() and not self._told:
            self.result()

    def settle(self) -> None:
        """Waits for it; all ranks call this, and agree on whether it is complete. CheckpointFailed when it is not and,
        with one rank, nobody was told."""
        self._ended.wait()
        if not self._agreed:
            self._agreed = True
            complete = self._ranks.all_true(self._failure is None)
            if not complete and self._ranks.count > 1:  # told or not: all ranks go on in the same way
                self._told = True
                raise self._failure or CheckpointFailed(
                    f"Another rank could not write its part of {self.directory}: it is not complete."
                )
            if self._made is not None and self._ranks.count > 1:
                self._retire(self._made)
        self.raise_if_failed()

    def finish(self) -> None:
        """Waits for this rank's part, and says that it does. What interrupts the wait drops the checkpoint."""
        if os.getpid() != self._pid or self.done():
            return
        log.info("waiting for checkpoint %s: %s", self.directory, self._how_far())
        try:
            self._ended.wait()
        except BaseException:
            self._dropped.set()
            raise

    # ---- the thread

    def _drain(self) -> None:
        try:
            self._copy()
            made = self._part.publish(self._pace)
        except BaseException as error:
            abandon(self._part.folder)
            why = "it was dropped" if isinstance(error, _DroppedError) else f"{type(error).__name__}: {error}"
            self._failure = CheckpointFailed(
                f"Checkpoint {self.directory} was not completed in the background: {why.removesuffix('.')}. Older ones "
                "are as they were."
            )
            self._failure.__cause__ = error
            log.error("%s", self._failure)
        else:
            self._complete(made)
        finally:
            self._part.let_go()
            self._ended.set()

    def _copy(self) -> None:
        most = max((buffer_bytes(state) for state, _ in self._part.pending), default=0)
        buffer = aligned_buffer(most) if most else None
        address = 0 if buffer is None else buffer.ctypes.data
        with IoPool(THREADS) as pool:
            for state, target in self._part.pending:
                write_state(pool, state, target, address, self._pace)
                state.close()

    def _complete(self, made: Checkpoint) -> None:
        self._made = made
        log.info("checkpoint %s is complete: %s", self.directory, self._how_far())
        if self._ranks.count == 1:
            self._retire(made)

    def _pace(self, nbytes: int) -> None:
        """Waits while an update runs; then `nbytes` more are about to be written."""
        began = time.monotonic()
        # When the process ends a lane may be stuck, and nobody is left to say so.
        while self._updating() and threading.main_thread().is_alive() and not self._dropped.wait(LOOK_SECONDS):
            pass
        if self._dropped.is_set():
            raise _DroppedError
        now, progress = time.monotonic(), self._progress
        progress.paused_seconds += now - began
        if now - progress.said > SAY_SECONDS:
            progress.said = now
            log.info("checkpoint %s: %s", self.directory, self._how_far())
        progress.written_bytes += nbytes

    def _how_far(self) -> str:
        progress, seconds = self._progress, time.monotonic() - self._progress.began
        return (
            f"{progress.written_bytes:,} of {self.total_bytes:,} bytes in {seconds:.1f} s, "
            f"{progress.paused_seconds:.1f} s of them waiting for updates"
        )

    def _retire(self, made: Checkpoint) -> None:
        try:
            self._on_complete(made)
        except OSError as error:
            log.warning("checkpoint %s is complete, but older ones stay behind: %s", self.directory, error)


def sync_all(folder: Path) -> None:
    """All files in it, and all names; what a user's `save_also` has written too."""
    for at, _, names in os.walk(folder):
        for name in names:
            sync(Path(at, name))
        sync(Path(at))
    sync(folder.parent)
