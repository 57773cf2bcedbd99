"""Another process with scratch on a path, for test_scratch: it lives until it is told to end, or is killed."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from tidegate.agent.tiers.scratch import Scratch, find_leftovers
from tidegate.agent.tiers.scratch_owner import Owner

SPAWN = mp.get_context("spawn")


class Trainer:
    def __init__(self, directory: Path, run: str, rank: int) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_train, args=(theirs, directory, run, rank))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(60)
        self.owner: Owner = self._pipe.recv()

    def look(self, directory: Path) -> list[str]:
        """What it thinks of all scratch there."""
        self._pipe.send(directory)
        answer: list[str] = self._pipe.recv()
        return answer

    def finish(self) -> None:
        self._pipe.send(None)
        self._process.join()
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def trainer(directory: Path, run: str = "llama", rank: int = 0) -> Iterator[Trainer]:
    other = Trainer(directory, run, rank)
    try:
        yield other
    finally:
        other.kill()


def _train(pipe: Connection, directory: Path, run: str, rank: int) -> None:
    with closing(Scratch.create(directory, run, rank)) as scratch:
        (scratch.directory / "state").write_bytes(bytes(100_000))
        pipe.send(scratch.owner)
        while (asked := pipe.recv()) is not None:
            pipe.send([leftover.alive for leftover in find_leftovers(asked)])
