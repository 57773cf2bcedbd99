"""Interfaces of the objects that an optimizer closes together with itself, or informs about changes of its parameters
and its state."""

from __future__ import annotations

from typing import Protocol


class Closeable(Protocol):
    """An object that is closed together with the optimizer."""

    def close(self) -> None: ...


class RebuildListener(Closeable, Protocol):
    """An object that the optimizer informs when the engine was rebuilt."""

    def rebuild(self) -> None:
        """Called when the optimizer has other parameters, or works on another device."""


class AttachmentListener(RebuildListener, Protocol):
    """Interface of an attachment (`tidegate.attach`) that the optimizer calls."""

    def extended(self) -> None:
        """Called when parameters were added to the optimizer."""

    def resumed(self) -> None:
        """Called when the optimizer has loaded a state, and continues with the step count of this state."""
