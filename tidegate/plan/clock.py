"""How long ops on storage paths take, as far as a planner cares."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.plan.ops import Op, OpKind
from tidegate.plan.schedule import TypicalClock
from tidegate.plan.split import PathSpeeds


class PathClock(TypicalClock):
    """Typical times of copies and updates, and of paths those that were measured: to order ops, nothing else.

    While a step is under way a path is read and written at once: where these share the device, each has half of it.
    """

    def __init__(self, speeds: Mapping[str, PathSpeeds]) -> None:
        self._speeds = speeds

    def seconds(self, op: Op, /) -> float:
        if op.path is None or op.path not in self._speeds:
            return super().seconds(op)
        speeds = self._speeds[op.path]
        fetches = op.kind is OpKind.FETCH
        alone = op.nbytes / (speeds.read_bytes_per_second if fetches else speeds.write_bytes_per_second)
        return alone if speeds.duplex else 2 * alone
