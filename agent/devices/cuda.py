"""The CUDA device: a stream a lane, events between them, pinned host memory, device memory from torch's allocator.

Every call that enqueues work returns at once. What orders one stream's work with another's, or with the host's, is an
event that somebody waits for, and nothing else; tests/agent/test_cuda_order.py drops each of these waits in turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Copy, Event, GradRef, UpdateRun
from tidegate.agent.devices.cuda_runtime import CudaRuntime, Marker, Norms, Stream
from tidegate.agent.devices.pinned_memory import PinnedPool
from tidegate.agent.devices.split_copies import in_pieces
from tidegate.errors import MemoryBudgetError
from tidegate.plan.ops import D2H, DEVICE, H2D
from tidegate.wire.base import DeviceKind

log = logging.getLogger("tidegate.devices")

ANCHOR_SECONDS: Final = 10.0
"""Times between events come as fp32 milliseconds and two clocks drift: after this long they are compared anew."""

ANCHOR_TRIES: Final = 4

GOOD_ANCHOR_SECONDS: Final = 1e-3
"""A comparison that is off by no more is always taken."""

DRIFT: Final = 5e-5
"""By which part two clocks may differ in speed, about."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A moment on both clocks: `marker` was reached at `seconds` of the host's monotonic clock, ± `error_seconds`."""

    marker: Marker
    seconds: float
    error_seconds: float


class HostClock:
    """Tells when markers were reached on the host's monotonic clock."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        # A stream that is always idle: a marker on it is reached as soon as it is recorded.
        self._stream = runtime.new_stream("clock")
        self._comparing = threading.Lock()
        self._compared = time.monotonic()
        self.anchor = self._compare()

    def seconds(self, anchor: Anchor, marker: Marker) -> float:
        """`anchor`: one that was taken before `marker` was recorded. `marker` must have been reached."""
        return anchor.seconds + self._runtime.seconds_between(anchor.marker, marker)

    def fresh(self) -> Anchor:
        """For what is recorded from now on: after a long pause the clocks are compared before."""
        self.refresh()
        return self.anchor

    def refresh(self) -> None:
        """Where the GPU is too busy for a good comparison the last one may stay."""
        now = time.monotonic()
        if now - self._compared > ANCHOR_SECONDS and self._comparing.acquire(blocking=False):
            try:
                found, self._compared = self._compare(), now
                old_error = self.anchor.error_seconds + DRIFT * (now - self.anchor.seconds)
                if found.error_seconds < max(GOOD_ANCHOR_SECONDS, old_error):
                    self.anchor = found
            finally:
                self._comparing.release()

    def _compare(self) -> Anchor:
        """The best of a few: the first has to wake up the GPU, any may be interrupted."""
        return min((self._compare_once() for _ in range(ANCHOR_TRIES)), key=lambda anchor: anchor.error_seconds)

    def _compare_once(self) -> Anchor:
        before = time.monotonic()
        marker = self._runtime.record(self._stream, timed=True)
        self._runtime.host_waits(marker)
        after = time.monotonic()
        return Anchor(marker, (before + after) / 2, (after - before) / 2)


class Work:
    """Work on a stream, between two markers, timed ones if `span` is to be asked for. `done` is called by every thread
    that has waited for it."""

    __slots__ = ("_anchor", "_clock", "_done", "_runtime", "end", "start")

    def __init__(
        self,
        runtime: CudaRuntime,
        clock: HostClock,
        anchor: Anchor,
        start: Marker,
        end: Marker,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._runtime, self._clock, self._anchor = runtime, clock, anchor
        self.start, self.end = start, end
        self._done = done

    def wait(self) -> None:
        self._runtime.host_waits(self.end)
        if self._done is not None:
            self._done()

    def span(self) -> tuple[float, float]:
        found = self._clock.seconds(self._anchor, self.start), self._clock.seconds(self._anchor, self.end)
        self._clock.refresh()
        return found


class Lanes:
    """The streams, one a lane."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._streams = {lane: runtime.new_stream(lane) for lane in (H2D, D2H, DEVICE)}
        self.used = False
        """Since the device was last closed."""

    def __getitem__(self, lane: str) -> Stream:
        self.used = True
        return self._streams[lane]

    def copies_at_rest(self) -> None:
        """Waits for copies from and to host memory."""
        self._at_rest(H2D, D2H)

    def at_rest(self) -> None:
        self._at_rest(H2D, D2H, DEVICE)

    def _at_rest(self, *lanes: str) -> None:
        close_all(*(partial(self._wait, self._streams[lane]) for lane in lanes))

    def _wait(self, stream: Stream) -> None:
        self._runtime.host_waits(self._runtime.record(stream))


def _abandon(runtime: CudaRuntime, lanes: Lanes, taken: set[int], pid: int) -> None:
    """Nobody has closed this device. What is left is given back when the lanes have done their work."""
    if os.getpid() != pid or not (lanes.used or taken):  # a fork has no GPU
        return
    try:
        close_all(lanes.at_rest, *(partial(runtime.free, address) for address in taken))
    except Exception as error:
        log.warning("The GPU failed while a device that was not closed went: %s: %s", type(error).__name__, error)


class CudaDevice:
    """One GPU. `limit_bytes` bounds device memory further than the GPU does; 0 for no such bound.

    Host buffers come from a pool and go back to it when nobody holds them: whoever lets one go has waited for the work
    on it. `free` takes the same for granted; `close` waits for copies that are on their way. A device that is dropped
    instead waits for all lanes, and gives back what it has.
    """

    def __init__(self, runtime: CudaRuntime, limit_bytes: int = 0) -> None:
        self._runtime = runtime
        self._lanes = Lanes(runtime)
        self._clock = HostClock(runtime)
        self._host = PinnedPool(runtime, self._lanes.copies_at_rest)
        self._taken: set[int] = set()
        """Addresses of device memory."""
        weakref.finalize(self, _abandon, runtime, self._lanes, self._taken, os.getpid()).atexit = False
        capacity = runtime.capacity_bytes()
        self.capacity_bytes = min(limit_bytes, capacity) if limit_bytes else capacity

    @property
    def kind(self) -> DeviceKind:
        return "cuda"

    @property
    def in_use_bytes(self) -> int:
        return self._runtime.in_use_bytes()

    def take_peak_bytes(self) -> int:
        return self._runtime.take_peak_bytes()

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        """Lanes must be made to wait for `now()` before they touch it."""
        free = self.capacity_bytes - self.in_use_bytes
        reason: MemoryError | None = None
        if nbytes <= free:
            try:
                address = self._runtime.alloc(nbytes)
                self._taken.add(address)
                return address
            except MemoryError as error:
                reason = error
        raise MemoryBudgetError(
            f"{nbytes:,} bytes do not fit in device memory: {max(free, 0):,} of {self.capacity_bytes:,} are not in "
            f"use{', but too scattered' if reason else ''}. Lower static_ratio, use smaller subgroups or fewer slots.",
            nbytes, free,
        ) from reason  # fmt: skip

    def free(self, address: int) -> None:
        self._taken.remove(address)
        self._runtime.free(address)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self._host.take(nbytes)

    def adopt(self, tensor: torch.Tensor) -> None:
        """The framework's allocator counts it already."""

    # ---- order

    def now(self) -> Event:
        marker = self._runtime.record(self._runtime.current_stream())
        return Work(self._runtime, self._clock, self._clock.anchor, marker, marker)

    def mark(self) -> Event:
        anchor, marker = self._clock.fresh(), self._runtime.record(self._runtime.current_stream(), timed=True)
        return Work(self._runtime, self._clock, anchor, marker, marker)

    def block(self, event: Event) -> None:
        if isinstance(event, Work):
            self._runtime.stream_waits(self._runtime.current_stream(), event.end)
        else:
            event.wait()

    def wait(self, lane: str, event: Event) -> None:
        if isinstance(event, Work):
            self._runtime.stream_waits(self._lanes[lane], event.end)
        else:
            event.wait()

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        self._runtime.used_by(tensor, self._lanes[lane])

    # ---- work

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event:
        anchor, stream = self._clock.fresh(), self._lanes[lane]
        start = self._runtime.record(stream, timed=True)
        self._runtime.copy(in_pieces(copies), lane == H2D, stream)
        return Work(self._runtime, self._clock, anchor, start, self._runtime.record(stream, timed=True))

    def update(self, runs: Sequence[UpdateRun]) -> Event:
        anchor, stream = self._clock.fresh(), self._lanes[DEVICE]
        start = self._runtime.record(stream, timed=True)
        self._runtime.update(runs, stream)
        return Work(self._runtime, self._clock, anchor, start, self._runtime.record(stream, timed=True))

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, Norms]:
        """The list is filled by the thread that waits for the event."""
        anchor, stream, found = self._clock.fresh(), self._lanes[DEVICE], Norms()
        start = self._runtime.record(stream, timed=True)
        read = self._runtime.norms(grads, stream)
        end = self._runtime.record(stream, timed=True)

        def fill() -> None:
            if len(found) < len(grads):
                found[:] = read()  # at once: another thread that has waited, too, may be reading

        return Work(self._runtime, self._clock, anchor, start, end, fill), found

    def close(self) -> None:
        """Whatever failed before may have left copies behind, from and to pages that are unpinned now.

        Nothing is left out because the GPU fails; then the first error is raised.
        """
        try:
            close_all(self._lanes.copies_at_rest, self._host.close)
        finally:
            self._lanes.used = False
