"""Makes the engines of a test defer as many flushes as their memory for gradients has room for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tidegate.agent.engine.planning_inputs import IdleTime
from tidegate.plan import deferral

LONG = 100.0
"""Idle seconds in which a path writes everything."""


@contextlib.contextmanager
def deferring(seconds: float = LONG, updates_ahead: int = 1) -> Iterator[None]:
    """In the block, engines expect paths to be idle for so long after each step; a slot may take gradients that were
    used only `updates_ahead` updates before."""

    def expect(self: IdleTime, _: float) -> None:
        self.seconds = seconds

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(IdleTime, "observe", expect)
        patched.setattr(deferral, "UPDATES_AHEAD", updates_ahead)
        yield
