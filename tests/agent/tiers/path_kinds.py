"""Every kind of storage path, as `test_path_contract.py` takes it: how to make one, damage it, and let it fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from tests.agent.tiers.faults import always, break_mover, flip_bit, heal_mover, once
from tests.agent.tiers.object_server import Asked, gate, s3_server, settings_of, use_credentials
from tidegate.agent.tiers.file_path import PathSettings


class Medium(Protocol):
    """A medium for paths of one kind. A place is the name of one path's part of the medium, empty at first."""

    passing: int
    """What the medium answers where a second try may succeed."""
    broken: int
    """What it answers where no try will succeed."""
    full: int | None
    """What it answers where there is no space for what is written; None where a medium never says so."""
    holds: bool
    """Whether a checkpoint can hold the state of a path, so that it need not copy the state at once."""

    def settings(self, place: str, **changes: Any) -> Any:
        """Settings of a path at this place, with blocks of 16 KiB: the state of a subgroup is several blocks."""

    def stored(self, place: str) -> list[str]:
        """Names of all that is stored at this place."""

    def damage(self, path: Any, subgroup: int) -> None:
        """Changes a bit of the subgroup's state where it is stored."""

    def cut(self, path: Any, subgroup: int) -> None:
        """Removes the end of the subgroup's state where it is stored."""

    def lose(self, path: Any, subgroup: int) -> None:
        """Removes all of the subgroup's state where it is stored, without asking the path."""

    def refuse(self, path: Any, operation: str, answer: int, times: int | None = None) -> None:
        """The next `times` reads or writes of a block get this answer; all of them where `times` is None."""

    def heal(self, path: Any, operation: str) -> None:
        """Ends what `refuse` has begun."""


class Directory:
    """Paths in directories. Transfers are refused with an errno."""

    passing, broken, full, holds = errno.EIO, errno.ENODEV, errno.ENOSPC, True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def settings(self, place: str, **changes: Any) -> PathSettings:
        (self._folder / place).mkdir(exist_ok=True)
        return PathSettings(directory=self._folder / place, **{"block_bytes": 16384, **changes})

    def stored(self, place: str) -> list[str]:
        return [str(found) for found in (self._folder / place).rglob("*") if found.is_file()]

    def damage(self, path: Any, subgroup: int) -> None:
        flip_bit(Path(path.states[subgroup].name))

    def cut(self, path: Any, subgroup: int) -> None:
        file = path.states[subgroup].name
        os.truncate(file, os.path.getsize(file) - 4096)

    def lose(self, path: Any, subgroup: int) -> None:
        os.unlink(path.states[subgroup].name)

    def refuse(self, path: Any, operation: str, answer: int, times: int | None = None) -> None:
        break_mover(path._mover, operation, always(answer) if times is None else once(answer, times))

    def heal(self, path: Any, operation: str) -> None:
        heal_mover(path._mover, operation)


class ObjectStore:
    """Paths in an object store: a real S3 server behind a gate. Requests are refused with a status of HTTP."""

    passing, broken, full, holds = 503, 403, None, False
    _METHODS: Final = {"read": "GET", "write": "PUT"}

    def __init__(self, servers: ExitStack) -> None:
        use_credentials(servers.enter_context(pytest.MonkeyPatch.context()))
        self._server = servers.enter_context(s3_server())
        self._gate = servers.enter_context(gate(self._server))

    def settings(self, place: str, **changes: Any) -> Any:
        return settings_of(self._gate.endpoint, place, **{"retry_seconds": 5.0, **changes})

    def stored(self, place: str) -> list[str]:
        return self._server.keys(f"{place}/")

    def damage(self, path: Any, subgroup: int) -> None:
        key = self._keys(path, subgroup)[0]
        body = self._server.get(key)
        self._server.put(key, bytes([body[0] ^ 4]) + body[1:])

    def cut(self, path: Any, subgroup: int) -> None:
        self._server.delete(self._keys(path, subgroup)[-1])

    def lose(self, path: Any, subgroup: int) -> None:
        for key in self._keys(path, subgroup):
            self._server.delete(key)

    def _keys(self, path: Any, subgroup: int) -> list[str]:
        return [f"{path.settings.prefix}/{key}" for key in path.states[subgroup].stored.keys]

    def refuse(self, path: Any, operation: str, answer: int, times: int | None = None) -> None:
        left = always(answer) if times is None else once(answer, times)

        def refusal(asked: Asked) -> int | None:
            return left() or None if asked.method == self._METHODS[operation] else None

        self._gate.answer = refusal

    def heal(self, path: Any, operation: str) -> None:
        self._gate.answer = lambda _: None


@contextmanager
def directories(folder: Path) -> Iterator[Medium]:
    yield Directory(folder)


@contextmanager
def object_store(_: Path) -> Iterator[Medium]:
    with ExitStack() as servers:
        yield ObjectStore(servers)


KINDS: Final = (directories, object_store)
"""For each kind of path, what makes a medium for it. The argument is a folder that may be used for it."""
