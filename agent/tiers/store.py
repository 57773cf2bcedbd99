"""All storage paths of a rank together: the third level of memory, and what it knows of its speeds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.agent.subgroups import Layout
from tidegate.agent.tiers.format import StateKind, file_bytes
from tidegate.agent.tiers.path import PathSettings, StoragePath, Transfer
from tidegate.kernels import WeightFormat
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.schedule import TypicalClock
from tidegate.plan.split import PathSpeeds

CALIBRATION_BYTES: Final = 64 << 20
RULE: Final = "adamw"
FORMATS: Final = {fmt: number for number, fmt in enumerate(WeightFormat)}


class TierStore:
    """Knows where the state of each subgroup lies. Lanes fetch and flush; everything else happens between steps."""

    def __init__(self, paths: Mapping[str, PathSettings], rank: int = 0) -> None:
        self.run_id = uuid.uuid4()
        self.rank = rank
        self.step = 0
        """Number of the update that writes now."""
        self.paths: dict[str, StoragePath] = {}
        self.last_checkpoint: str | None = None
        """What to load when state is lost."""
        self._kinds: dict[int, StateKind] = {}
        try:
            for name, settings in paths.items():
                self.paths[name] = StoragePath(name, settings, self.run_id.hex, rank, self.run_id.bytes)
        except BaseException:
            self.close()
            raise
        self.speeds: dict[str, PathSpeeds] = {}

    def know(self, layouts: Sequence[Layout]) -> None:
        """Subgroups that may come to live on a path."""
        for layout in layouts:
            self._kinds[layout.id] = kind_of(layout, self.rank)

    def calibrate(self) -> None:
        """Measures each path, on no more than a share of what will be stored: a small state deserves no long start."""
        stored = sum(kind.data_bytes for kind in self._kinds.values())
        for name, path in self.paths.items():
            self.speeds[name] = path.calibrate(min(CALIBRATION_BYTES, stored // 4))

    def capacity(self, held: Mapping[int, str]) -> dict[str, int]:
        """How many subgroups each path can hold, with those that it holds already."""
        largest = max(self._file_bytes(name, kind) for name in self.paths for kind in self._kinds.values())
        count = {name: sum(where == name for where in held.values()) for name in self.paths}
        return {name: count[name] + path.free_bytes // largest for name, path in self.paths.items()}

    def _file_bytes(self, path: str, kind: StateKind) -> int:
        return file_bytes(kind.data_bytes, self.paths[path].settings.block_bytes)

    def reserve(self, subgroup: int, path: str) -> None:
        """Makes sure that its state can be written to `path`. PathFull when it cannot."""
        if not self.paths[path].holds(subgroup):
            self.paths[path].make(self._kinds[subgroup])

    def left(self, subgroup: int, path: str) -> None:
        """Its state is elsewhere now."""
        self.paths[path].remove(subgroup)

    def is_new(self, path: str, subgroup: int) -> bool:
        """Nothing was written yet: its state is zeros."""
        return self.paths[path].is_new(subgroup)

    def fetch(self, path: str, subgroup: int, address: int) -> Transfer:
        return self.paths[path].read(subgroup, address)

    def flush(self, path: str, subgroup: int, address: int) -> Transfer:
        return self.paths[path].write(subgroup, address, self.step)

    def close(self) -> None:
        for path in self.paths.values():
            path.close()


def kind_of(layout: Layout, rank: int) -> StateKind:
    """What a file of this subgroup's state says of itself."""
    return StateKind(RULE, rank, layout.id, layout.numel, FORMATS[layout.format.weight], layout.format.state_bytes)


class PathClock(TypicalClock):
    """Typical times of copies and updates, and of paths those that were measured: to order ops, nothing else."""

    def __init__(self, speeds: Mapping[str, PathSpeeds]) -> None:
        self._speeds = speeds

    def seconds(self, op: Op, /) -> float:
        if op.path is None or op.path not in self._speeds:
            return super().seconds(op)
        speeds = self._speeds[op.path]
        fetches = op.kind is OpKind.FETCH
        return op.nbytes / (speeds.read_bytes_per_second if fetches else speeds.write_bytes_per_second)
