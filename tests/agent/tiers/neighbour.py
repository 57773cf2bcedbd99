"""Another process that holds a path when it is told to."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

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
    locks = TierLocks(directory, "device", **options)
    pipe.send("ready")
    while pipe.recv() == "enter":
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(locks, in_line, done))
        watch.start()
        with locks.hold() as held:
            done.set()
            watch.join()
            pipe.send(_answer(held))
            pipe.recv()
        pipe.send("left")


def _watch(locks: TierLocks, in_line: Event, done: threading.Event) -> None:
    while not done.wait(0.001):
        if locks.native.first:
            in_line.set()


def _answer(held: LockResult) -> tuple[bool, float]:
    return held.acquired, held.waited_seconds
