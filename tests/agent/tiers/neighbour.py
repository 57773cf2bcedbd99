"""Another process that holds a path when it is told to."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tidegate.agent.tiers import path_locks as locks_module
from tidegate.agent.tiers.path_locks import LockResult, TierLocks

SPAWN = mp.get_context("spawn")


class Neighbour:
    """`enter` asks it to hold, `entered` is its answer: (acquired, seconds waited)."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._in_line = SPAWN.Event()
        self._process = SPAWN.Process(target=_serve, args=(theirs, self._in_line, directory, options))
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def enter(self) -> None:
        self._in_line.clear()
        self._pipe.send("enter")

    def wait_until_in_line(self) -> None:
        """Until it has the turnstile and waits for a slot. Whoever enters has the turnstile for a moment, too, and is
        not in line then: the lock, as others see it, does not tell the two apart."""
        assert self._in_line.wait(60)

    def entered(self) -> tuple[bool, float]:
        assert self._pipe.poll(60)
        answer: tuple[bool, float] = self._pipe.recv()
        return answer

    def hold(self) -> bool:
        self.enter()
        return self.entered()[0]

    def leave(self) -> None:
        self._pipe.send("leave")
        assert self._pipe.recv() == "left"

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def neighbour(directory: Path, **options: Any) -> Iterator[Neighbour]:
    other = Neighbour(directory, **options)
    try:
        yield other
    finally:
        other.stop()


def _serve(pipe: Connection, in_line: Event, directory: Path, options: dict[str, Any]) -> None:
    pass_turnstile = locks_module._pass_turnstile

    def passed(fd: int) -> None:
        pass_turnstile(fd)
        in_line.set()

    locks_module._pass_turnstile = passed
    locks = TierLocks(directory, "device", **options)
    pipe.send("ready")
    while pipe.recv() == "enter":
        with locks.hold() as held:
            pipe.send(_answer(held))
            pipe.recv()
        pipe.send("left")


def _answer(held: LockResult) -> tuple[bool, float]:
    return held.acquired, held.waited_seconds
