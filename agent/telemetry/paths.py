"""Statistics of storage paths, sampled when a step ends."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Final

from tidegate.agent.engine.residency import Residences
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.logs import event
from tidegate.timeline.step_record import PathSample
from tidegate.wire.evidence import MAX_SUBGROUPS

log = logging.getLogger("tidegate")

DAY_SECONDS: Final = 86_400.0
WRITE_RATE_WINDOW_SECONDS: Final = 3_600.0
"""Length of the window over which the write rate is measured."""
WRITE_RATE_SAMPLE_SECONDS: Final = 30.0
"""Minimum time in seconds between two stored samples of the bytes written to a path. The write rate is computed from
these samples."""
MIN_WRITE_RATE_SECONDS: Final = 10.0
"""Least measured time in seconds before a daily rate is extrapolated, because the first steps are not typical."""


class WriteRate:
    """Computes the bytes written to a path per day, extrapolated from the last hour. Logs one warning if they exceed
    `limit` bytes per day; a `limit` of 0 means no limit."""

    def __init__(self, path: str, limit: int, now: float, written: int) -> None:
        self._path, self._limit = path, limit
        self._samples: deque[tuple[float, int]] = deque([(now, written)])

    def per_day(self, now: float, written: int) -> float | None:
        """Adds a measurement and returns the bytes per day. `now`: seconds on the monotonic clock. `written`: bytes
        written so far. None in the first MIN_WRITE_RATE_SECONDS seconds."""
        samples = self._samples
        if now - samples[-1][0] >= WRITE_RATE_SAMPLE_SECONDS:
            samples.append((now, written))
        while len(samples) > 1 and now - samples[1][0] >= WRITE_RATE_WINDOW_SECONDS:
            samples.popleft()
        since, before = samples[0]
        if now - since < MIN_WRITE_RATE_SECONDS:
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


class PathSampler:
    """Samples all storage paths once a step. The training thread calls it when no transfer of the step is in
    progress."""

    def __init__(self, store: TierStore, residences: Residences) -> None:
        self._store, self._residences = store, residences
        now = time.monotonic()
        self._write_rates = {
            name: WriteRate(name, path.settings.wear_bytes_per_day, now, path.counters.bytes["write"])
            for name, path in store.paths.items()
            if isinstance(path, StoragePath)  # drives of an object store are the operator's responsibility
        }
        self.capacities = {name: _capacity_bytes(path) for name, path in store.paths.items()}
        """Capacity of each path in bytes. It is read only once, because a read from a file system that hangs would
        delay a scrape."""
        for path in store.paths.values():
            path.counters.moves.clear()  # earlier transfers belong to no recorded phase

    def sample(self) -> tuple[PathSample, ...]:
        """Takes one sample of each path, with the transfers since the last call."""
        now = time.monotonic()
        return tuple(self._sample(name, path, now) for name, path in self._store.paths.items())

    def _sample(self, name: str, path: StoragePath | ObjectPath, now: float) -> PathSample:
        counters, ceiling = path.counters, self._store.ceilings[name]
        write_rate = self._write_rates.get(name)
        moves = tuple(counters.moves.popleft() for _ in range(len(counters.moves)))
        return PathSample(
            path=name,
            moves=moves,
            free_bytes=_free_bytes(path),
            bytes=dict(counters.bytes),
            lock_wait_seconds=dict(counters.lock_wait_seconds),
            errors=dict(counters.errors),
            ceiling_bytes_per_second={"read": ceiling.read_bytes_per_second, "write": ceiling.write_bytes_per_second},
            written_bytes_per_day=write_rate.per_day(now, counters.bytes["write"]) if write_rate is not None else None,
            retired=name in self._store.retired,
            capacity_subgroups=self._capacity_subgroups(name),
        )

    def _capacity_subgroups(self, name: str) -> int | None:
        """Subgroups that the path can hold; None without a known limit."""
        capacity = self._residences.known_capacity.get(name)
        return capacity if capacity is not None and capacity <= MAX_SUBGROUPS else None


def _free_bytes(path: StoragePath | ObjectPath) -> int | None:
    """Free bytes of a path. 0 when its directory is gone, so that a failing path does not prevent the report of the
    step."""
    try:
        return path.free_bytes
    except OSError:
        return 0


def _capacity_bytes(path: StoragePath | ObjectPath) -> int:
    """Capacity of a path in bytes; 0 when its directory is gone, or without a known limit."""
    try:
        return path.capacity_bytes or 0
    except OSError:
        return 0
