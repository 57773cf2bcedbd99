"""The objects that an optimizer closes together with itself, or tells of changes of its parameters and its state."""

from __future__ import annotations

from typing import Protocol


class Closeable(Protocol):
    """An object that is closed together with the optimizer."""

    def close(self) -> None: ...


class RebuildListener(Closeable, Protocol):
    """An object that adapts to a rebuilt engine."""

    def rebuild(self) -> None:
        """Called when the optimizer has other parameters, or works on another device."""


class AttachmentListener(RebuildListener, Protocol):
    """An attachment (`tidegate.attach`), as the optimizer sees it."""

    def extended(self) -> None:
        """Called when parameters were added to the optimizer."""

    def resumed(self) -> None:
        """Called when the optimizer has loaded a state, and counts its steps on from there."""
