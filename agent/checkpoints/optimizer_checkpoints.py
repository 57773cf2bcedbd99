"""Saves and loads the checkpoints of one optimizer, and tracks the checkpoint that is still written in the
background."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.checkpoint import Checkpoint
from tidegate.agent.checkpoints.discovery import choose_checkpoint
from tidegate.agent.checkpoints.reader import Reader
from tidegate.agent.checkpoints.writer import Contents, Target, save, save_in_background
from tidegate.agent.checkpoints.writer_lock import WriterLock
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.ranks import Ranks
from tidegate.errors import CheckpointFailed, ConfigError, ForeignState


class OptimizerCheckpoints:
    """Checkpoints of one optimizer. All methods are called between steps, after the update has ended."""

    def __init__(self, engine: Engine, phases: PhaseRecorder) -> None:
        self.engine, self._phases = engine, phases
        self._pending: PendingCheckpoint | None = None
        """The last checkpoint that was started in the background."""
        self._lock = WriterLock()

    def save(self, target: Target, small: Callable[[], Mapping[str, Any]], step: int) -> Checkpoint:
        """Saves a checkpoint of the state after update number `step`. `small`: function that returns the optimizer's
        state besides the subgroups. It is called when all transfers and earlier checkpoints have ended."""
        with self._idle():
            return save(self._contents(small, step), target, Ranks.current())

    def begin(
        self, target: Target, small: Callable[[], Mapping[str, Any]], step: int, memory_bytes: int | None
    ) -> PendingCheckpoint:
        """Starts a checkpoint of the state after update number `step`, which is completed in the background. `small`:
        function that returns the optimizer's state besides the subgroups. `memory_bytes`: limit of the host memory for
        copies of state that is not on a path; None for half of the free memory."""
        with self._idle():
            self._pending = save_in_background(self._contents(small, step), target, Ranks.current(), memory_bytes)
            return self._pending

    def _contents(self, small: Callable[[], Mapping[str, Any]], step: int) -> Contents:
        return Contents(self.engine, self.engine.shards, small(), step, self._lock)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Context manager for checkpoint work: waits until no transfer and no background checkpoint is running, and
        counts the time as the phase "checkpoint"."""
        self.engine.usability.require()
        self.engine.drop_plan()
        with self._phases.within("checkpoint"):
            if self._pending is not None:
                self._pending.wait_and_agree()
            self.engine.weights.adapt_to_edits()
            yield

    def find(self, source: str | os.PathLike[str] | Checkpoint, step: int | None) -> Checkpoint:
        """Finds the checkpoint to load. `source`: a checkpoint, which is returned, or a directory: then the result is
        the newest complete checkpoint in it, or with `step` the newest one of that step. Waits first for a checkpoint
        that is still written in the background."""
        if self._pending is not None:
            with suppress(CheckpointFailed):  # the failure was logged; an older checkpoint is used
                self._pending.wait_and_agree()
        rank = Ranks.current().rank
        if not isinstance(source, Checkpoint):
            return choose_checkpoint(source, rank, step)
        if step is not None:
            raise ConfigError(
                f"step={step} selects one of the checkpoints in a directory, but {source} is a single checkpoint: "
                "leave step out."
            )
        if source.manifest.rank != rank:
            raise ForeignState(source.folder, f"the part of rank {source.manifest.rank}", f"the part of rank {rank}")
        return source

    def load_state(self, checkpoint: Checkpoint, reader: Reader) -> None:
        """Loads the state of all subgroups from a checkpoint. If that fails, the engine is not usable until a
        checkpoint is loaded completely."""
        with self._phases.within("checkpoint"), self.engine.usability.replacing_state():
            self.engine.weights_loaded()
            if self.engine.store is not None:
                self.engine.store.step = checkpoint.step
                self.engine.store.last_checkpoint = os.fspath(checkpoint.directory)
            reader.scatter(self.engine)

    def raise_if_failed_alone(self) -> None:
        """Raises CheckpointFailed if there is only one rank, the last background checkpoint failed, and the error was
        not raised before. With several ranks it does nothing: `PendingCheckpoint.wait_and_agree` raises the error on
        all ranks."""
        if self._pending is not None:
            self._pending.raise_if_failed_alone()

    def raise_if_failed(self) -> None:
        """Raises CheckpointFailed if the last background checkpoint failed and the error was not raised before."""
        if self._pending is not None:
            self._pending.raise_if_failed()

    def finish(self) -> None:
        """Waits for this rank's part of a background checkpoint. If an exception interrupts the wait, the checkpoint is
        given up."""
        if self._pending is not None:
            self._pending.finish()

    def close(self) -> None:
        """Releases the locks of the directories. Idempotent; does nothing in a forked child."""
        self._lock.close()


def small_state(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], steps: Sequence[int]
) -> dict[str, Any]:
    """The optimizer's state besides the subgroups: param groups, step counts (`steps`), and state that is not stored by
    parameter. In param groups, parameters are replaced by their index in `params`."""
    places = {id(param): index for index, param in enumerate(params)}
    groups = [{**group, "params": [places[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"param_groups": groups, "state": others, "steps": list(steps)}
