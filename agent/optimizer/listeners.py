"""Interfaces of the objects that an optimizer closes together with itself, or informs about changes of its parameters
and its state."""

from __future__ import annotations

from typing import Protocol


class RebuildListener(Protocol):
    """An object that the optimizer informs when the engine was rebuilt, and closes together with itself."""

    def close(self) -> None: ...

    def rebuild(self) -> None:
        """Called when the optimizer has other parameters, or works on another device."""


class OverlapListener(RebuildListener, Protocol):
    """Interface of an overlap of updates with the forward (`tidegate.overlap_forward`) that the optimizer calls."""

    in_background: bool
    """Whether `step()` returns as soon as it is known which parameters are updated, while the update continues in the
    background."""


class AttachmentListener(RebuildListener, Protocol):
    """Interface of an attachment (`tidegate.attach`) that the optimizer calls."""

    def extended(self) -> None:
        """Called when parameters were added to the optimizer."""

    def resumed(self) -> None:
        """Called when the optimizer has loaded a state, and continues with the step count of this state."""
