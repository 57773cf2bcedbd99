"""Records whether an engine can be used. It cannot be used in a forked child, or after a failure that left weights or
state incomplete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tidegate.agent.engine.executor import Executor
from tidegate.errors import EngineError


class Usability:
    """Records whether one engine can be used and, if it cannot, the reason."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pid = os.getpid()
        self.problem: str | None = None
        """The reason why the engine cannot be used until a complete state is loaded; None if the engine has not
        failed."""

    @property
    def is_in_own_process(self) -> bool:
        """False in a forked child that has inherited the engine."""
        return os.getpid() == self._pid

    @property
    def is_usable(self) -> bool:
        """Whether the engine can make steps and its state can be read."""
        return self.problem is None and self.is_in_own_process

    def require_loadable(self) -> None:
        """Raises EngineError if the engine stays unusable even when a complete state is loaded: it is closed, a lane is
        stuck, or it belongs to a parent process."""
        if not self.is_in_own_process or self._executor.closed:
            self.require()
        if self._executor.stuck:
            raise EngineError(
                f"A lane is stuck ({self.problem}) and may still use this optimizer's memory: build a new optimizer."
            )

    def require(self) -> None:
        """Raises EngineError, with the reason, if the engine cannot make steps and its state cannot be read."""
        if not self.is_in_own_process:
            raise EngineError(
                "This optimizer belongs to the parent process; a forked child cannot step it. Build the optimizer "
                "after the fork."
            )
        if self.problem:
            raise EngineError(
                f"This optimizer is not usable: {self.problem.rstrip('.')}. "
                "Load weights and state of a checkpoint, or build a new one."
            )

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Context manager for code that replaces the state. If the code raises, the engine cannot be used until a
        complete state is loaded."""
        try:
            yield
        except BaseException as error:
            self.problem = f"loading its state failed: {type(error).__name__}: {error}"
            raise
