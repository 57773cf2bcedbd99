"""Checkpoints of one optimizer in directories: when they may be written and read, and the one that still is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.manifest import Checkpoint, choose
from tidegate.agent.checkpoints.reader import Reader
from tidegate.agent.checkpoints.writer import Contents, Target, begin, save
from tidegate.agent.checkpoints.writer_lock import Writing
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.ranks import Ranks
from tidegate.errors import CheckpointFailed, ConfigError, ForeignState


class CheckpointFiles:
    """Between steps only: who calls has waited for the update."""

    def __init__(self, engine: Engine, phases: PhaseRecorder) -> None:
        self.engine, self._phases = engine, phases
        self._pending: PendingCheckpoint | None = None
        """The last one that was begun."""
        self._writing = Writing()

    def save(self, target: Target, small: Callable[[], Mapping[str, Any]], step: int) -> Checkpoint:
        """small: what it holds beside the state of subgroups, as it is when nothing is in flight any more."""
        with self._at_rest():
            return save(self._contents(small, step), target, Ranks.current())

    def begin(
        self, target: Target, small: Callable[[], Mapping[str, Any]], step: int, memory_bytes: int | None
    ) -> PendingCheckpoint:
        """As `save`; the rest is written while training goes on."""
        with self._at_rest():
            self._pending = begin(self._contents(small, step), target, Ranks.current(), memory_bytes)
            return self._pending

    def _contents(self, small: Callable[[], Mapping[str, Any]], step: int) -> Contents:
        return Contents(self.engine, self.engine.shards, small(), step, self._writing)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Nothing is in flight, and no checkpoint is still written."""
        self.engine.require_usable()
        self.engine.drop_plan()
        with self._phases.within("checkpoint"):
            if self._pending is not None:
                self._pending.settle()
            self.engine.weights.take_edited()
            yield

    def find(self, place: str | os.PathLike[str] | Checkpoint, step: int | None) -> Checkpoint:
        """The one that is given, the newest complete one of a directory, or that of `step`; one that is still written
        is waited for."""
        if self._pending is not None:
            with suppress(CheckpointFailed):  # it was logged; an older one is what one wants now
                self._pending.settle()
        rank = Ranks.current().rank
        if not isinstance(place, Checkpoint):
            return choose(place, rank, step)
        if step is not None:
            raise ConfigError(f"step={step} is for a directory, and {place} is one checkpoint: leave it out.")
        if place.manifest.rank != rank:
            raise ForeignState(place.folder, f"the part of rank {place.manifest.rank}", f"that of rank {rank}")
        return place

    def take(self, found: Checkpoint, reader: Reader) -> None:
        """State of subgroups from a checkpoint; when that fails the engine is not usable until one is loaded whole."""
        with self._phases.within("checkpoint"):
            try:
                self.engine.weights_loaded()
                if self.engine.store is not None:
                    self.engine.store.step = found.step
                    self.engine.store.last_checkpoint = os.fspath(found.directory)
                reader.scatter(self.engine)
            except BaseException as error:
                self.engine.state_lost(error)
                raise

    def raise_if_failed_alone(self) -> None:
        """See `PendingCheckpoint.raise_if_failed_alone`."""
        if self._pending is not None:
            self._pending.raise_if_failed_alone()

    def raise_if_failed(self) -> None:
        """CheckpointFailed, once, when the last one failed and nobody was told."""
        if self._pending is not None:
            self._pending.raise_if_failed()

    def finish(self) -> None:
        """Waits for this rank's part of what is still written; what interrupts the wait drops it."""
        if self._pending is not None:
            self._pending.finish()

    def close(self) -> None:
        """Others may write to the directories now. Idempotent; nothing in a fork."""
        self._writing.close()


def small_state(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], steps: Sequence[int]
) -> dict[str, Any]:
    """What a checkpoint holds beside the state of subgroups. Parameters are numbered as in `params`."""
    places = {id(param): index for index, param in enumerate(params)}
    groups = [{**group, "params": [places[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"param_groups": groups, "state": others, "steps": list(steps)}
