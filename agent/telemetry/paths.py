"""What storage paths did: taken from them when a step ends, and made into rows when somebody asks."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from tidegate.agent.engine.residency import Residences
from tidegate.agent.telemetry.bytes_by_phase import Moved, moves_by_phase
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.agent.tiers.transfers import Transfer
from tidegate.logs import event
from tidegate.plan.tier_split import PathSpeeds
from tidegate.timeline.timeline import PhaseSpan
from tidegate.wire.agent import MAX_SUBGROUPS
from tidegate.wire.step import PathOperation, PathRow, PathState

log = logging.getLogger("tidegate")

DAY_SECONDS: Final = 86_400.0
WEAR_WINDOW_SECONDS: Final = 3_600.0
WEAR_SAMPLE_SECONDS: Final = 30.0
MIN_WEAR_SECONDS: Final = 10.0
"""Before, the first steps' pace says little about a day."""


@dataclass(frozen=True, slots=True)
class PathNote:
    """One path at the end of a step: what it moved since the last one, and its sums since the run began."""

    name: str
    moves: tuple[tuple[str, Transfer], ...]
    free_bytes: int | None
    """None where no bound is known."""
    nbytes: Mapping[str, int]
    lock_wait_seconds: Mapping[str, float]
    errors: Mapping[str, int]
    ceilings: PathSpeeds
    written_bytes_per_day: float | None
    retired: bool = False
    capacity_subgroups: int | None = None
    """None where no bound is known."""


class Wear:
    """Bytes written per day at the pace of the last hour; a warning, once, when that is beyond `limit` (0: none)."""

    def __init__(self, path: str, limit: int, now: float, written: int) -> None:
        self._path, self._limit = path, limit
        self._samples: deque[tuple[float, int]] = deque([(now, written)])

    def per_day(self, now: float, written: int) -> float | None:
        """`written` bytes so far at `now`, in seconds; None while it is too early to tell."""
        samples = self._samples
        if now - samples[-1][0] >= WEAR_SAMPLE_SECONDS:
            samples.append((now, written))
        while len(samples) > 1 and now - samples[1][0] >= WEAR_WINDOW_SECONDS:
            samples.popleft()
        since, before = samples[0]
        if now - since < MIN_WEAR_SECONDS:
            return None
        rate = (written - before) / (now - since) * DAY_SECONDS
        if 0 < self._limit < rate:
            log.warning(
                "path %s: %s bytes a day are written at this pace, more than wear_bytes_per_day=%s. A larger "
                "host_cache or static_ratio, or a smaller share of tier_split, writes less.",
                self._path, f"{rate:,.0f}", f"{self._limit:,}",
                extra=event("path_wears", path=self._path, bytes_per_day=rate, limit=self._limit),
            )  # fmt: skip
            self._limit = 0
        return rate


class PathWatch:
    """Asked by the training thread once a step, when no transfer is under way that belongs to it."""

    def __init__(self, store: TierStore, residences: Residences) -> None:
        self._store, self._residences = store, residences
        now = time.monotonic()
        self._wear = {
            name: Wear(name, path.settings.wear_bytes_per_day, now, path.counters.bytes["write"])
            for name, path in store.paths.items()
            if isinstance(path, StoragePath)  # whoever runs an object store looks after its media
        }
        self.capacities = {name: _capacity_bytes(path) for name, path in store.paths.items()}
        """Sizes. Asked once: a file system that hangs must not hold up a scrape."""
        for path in store.paths.values():
            path.counters.moves.clear()  # what was moved before has no phase of ours

    def note(self) -> tuple[PathNote, ...]:
        """Takes what was moved since the last call."""
        now = time.monotonic()
        return tuple(self._note(name, path, now) for name, path in self._store.paths.items())

    def _note(self, name: str, path: StoragePath | ObjectPath, now: float) -> PathNote:
        counters = path.counters
        wear = self._wear.get(name)
        moves = tuple(counters.moves.popleft() for _ in range(len(counters.moves)))
        return PathNote(
            name=name,
            moves=moves,
            free_bytes=_free_bytes(path),
            nbytes=dict(counters.bytes),
            lock_wait_seconds=dict(counters.lock_wait_seconds),
            errors=dict(counters.errors),
            ceilings=self._store.ceilings[name],
            written_bytes_per_day=wear.per_day(now, counters.bytes["write"]) if wear is not None else None,
            retired=name in self._store.retired,
            capacity_subgroups=self._capacity_subgroups(name),
        )

    def _capacity_subgroups(self, name: str) -> int | None:
        found = self._residences.known_capacity.get(name)
        return found if found is not None and found <= MAX_SUBGROUPS else None


def _free_bytes(path: StoragePath | ObjectPath) -> int | None:
    """0 when its directory is gone: the other figures of the step are still wanted."""
    try:
        return path.free_bytes
    except OSError:
        return 0


def _capacity_bytes(path: StoragePath | ObjectPath) -> int:
    """0 when its directory is gone, or no bound is known."""
    try:
        return path.capacity_bytes or 0
    except OSError:
        return 0


def path_rows(notes: Sequence[PathNote], phases: Sequence[PhaseSpan]) -> tuple[PathRow, ...]:
    """Bytes and busy time by path, operation and phase; a transfer across a boundary is divided by time.

    A lane may have two transfers in progress: the time is then counted once.
    """
    rows: defaultdict[tuple[str, str, str], Moved] = defaultdict(Moved)
    for note in notes:
        for operation, phase, nbytes, seconds in moves_by_phase(note.moves, phases):
            row = rows[note.name, operation, phase]
            row.nbytes += nbytes
            row.seconds += seconds
    return tuple(
        PathRow(
            path=path, operation=cast(PathOperation, operation), phase=phase, bytes=row.nbytes, busy_seconds=row.seconds
        )
        for (path, operation, phase), row in rows.items()
    )


def path_states(notes: Sequence[PathNote]) -> tuple[PathState, ...]:
    """Each path as the step ended."""
    return tuple(
        PathState(
            path=note.name,
            free_bytes=note.free_bytes,
            bytes=cast(dict[PathOperation, int], dict(note.nbytes)),
            lock_wait_seconds=cast(dict[PathOperation, float], dict(note.lock_wait_seconds)),
            errors=cast(dict[PathOperation, int], dict(note.errors)),
            ceiling_bytes_per_second={
                "read": note.ceilings.read_bytes_per_second,
                "write": note.ceilings.write_bytes_per_second,
            },
            written_bytes_per_day=note.written_bytes_per_day,
            retired=note.retired,
            capacity_subgroups=note.capacity_subgroups,
        )
        for note in notes
    )
