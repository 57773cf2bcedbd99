"""CUDA device: one stream per lane, events between them, pinned host memory, and device memory from torch's allocator.

Every call that enqueues work returns at once. Only waits for events order the work of one stream with another, or with
the host; tests/agent/devices/test_cuda_order.py leaves out each of these waits in turn to show that it is needed.
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
from tidegate.errors import MemoryBudgetError
from tidegate.plan.ops import D2H, DEVICE, H2D
from tidegate.wire.base import DeviceKind

log = logging.getLogger("tidegate.devices")

ANCHOR_SECONDS: Final = 10.0
"""Seconds after which the clocks of GPU and host are compared again. CUDA gives the time between two events in fp32
milliseconds, which is inexact for long times, and the clocks drift."""

ANCHOR_TRIES: Final = 4
"""Number of times that the clocks of GPU and host are compared in a row. Only the comparison with the smallest error is
used."""

GOOD_ANCHOR_SECONDS: Final = 1e-3
"""Error in seconds below which a new comparison of the clocks always replaces the previous one, even if the error of
the previous one is smaller."""

DRIFT: Final = 5e-5
"""Assumed relative difference in speed between the clocks of GPU and host. The error of a comparison of these clocks
grows by this number of seconds per second."""


@dataclass(frozen=True, slots=True)
class ClockSync:
    """Comparison of the GPU's clock with the host's: the GPU reached `marker` at `seconds` of the host's monotonic
    clock, ± `error_seconds`."""

    marker: Marker
    seconds: float
    error_seconds: float


class HostClock:
    """Converts the times of markers (CUDA events) from the GPU's clock to the host's monotonic clock."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        # A stream without other work: a marker on it is reached as soon as it is recorded.
        self._stream = runtime.new_stream("clock")
        self._comparing = threading.Lock()
        self._compared = time.monotonic()
        self.anchor = self._compare()

    def seconds(self, anchor: ClockSync, marker: Marker) -> float:
        """Returns the time at which `marker` was reached, in seconds on the host's monotonic clock. `anchor`: a
        comparison of the clocks that was made before `marker` was recorded. `marker` must have been reached."""
        return anchor.seconds + self._runtime.seconds_between(anchor.marker, marker)

    def fresh(self) -> ClockSync:
        """Returns the comparison of the clocks that converts the times of markers which are recorded from now on.
        Compares the clocks again first if the last comparison is older than ANCHOR_SECONDS."""
        self.refresh()
        return self.anchor

    def refresh(self) -> None:
        """Compares the clocks again if the last comparison is older than ANCHOR_SECONDS. If the GPU is too busy for a
        good comparison, the old comparison may stay in use."""
        now = time.monotonic()
        if now - self._compared > ANCHOR_SECONDS and self._comparing.acquire(blocking=False):
            try:
                new, self._compared = self._compare(), now
                old_error = self.anchor.error_seconds + DRIFT * (now - self.anchor.seconds)
                if new.error_seconds < max(GOOD_ANCHOR_SECONDS, old_error):
                    self.anchor = new
            finally:
                self._comparing.release()

    def _compare(self) -> ClockSync:
        """Compares the clocks ANCHOR_TRIES times, and returns the comparison with the smallest error. A single
        comparison may be bad: the first one has to wake the GPU up, and other threads may delay any of them."""
        return min((self._compare_once() for _ in range(ANCHOR_TRIES)), key=lambda anchor: anchor.error_seconds)

    def _compare_once(self) -> ClockSync:
        before = time.monotonic()
        marker = self._runtime.record(self._stream, timed=True)
        self._runtime.host_waits(marker)
        after = time.monotonic()
        return ClockSync(marker, (before + after) / 2, (after - before) / 2)


class StreamWork:
    """Event of work on a stream. The work is between the markers `start` and `end`, which must be timed if `span` is
    used.

    anchor: comparison of the clocks of GPU and host with which `span` converts times.
    done: function that is called in each thread that has waited for the work.
    """

    __slots__ = ("_anchor", "_clock", "_done", "_runtime", "end", "start")

    def __init__(
        self,
        runtime: CudaRuntime,
        clock: HostClock,
        anchor: ClockSync,
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


class LaneStreams:
    """The streams of the lanes."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._streams = {lane: runtime.new_stream(lane) for lane in (H2D, D2H, DEVICE)}
        self.used = False
        """Whether a lane was used since the device was last closed."""

    def __getitem__(self, lane: str) -> Stream:
        self.used = True
        return self._streams[lane]

    def wait_for_copies(self) -> None:
        """Blocks the calling thread until all copies from and to host memory are done."""
        self._wait_for(H2D, D2H)

    def wait_for_all(self) -> None:
        """Blocks the calling thread until all work on the lanes is done."""
        self._wait_for(H2D, D2H, DEVICE)

    def _wait_for(self, *lanes: str) -> None:
        close_all(*(partial(self._wait, self._streams[lane]) for lane in lanes))

    def _wait(self, stream: Stream) -> None:
        self._runtime.host_waits(self._runtime.record(stream))


def _clean_up_unclosed(runtime: CudaRuntime, lanes: LaneStreams, allocated: set[int], pid: int) -> None:
    """Finalizer of a device that was not closed: waits for the lanes and frees device memory."""
    if os.getpid() != pid or not (lanes.used or allocated):  # a fork has no GPU
        return
    try:
        close_all(lanes.wait_for_all, *(partial(runtime.free, address) for address in allocated))
    except Exception as error:
        log.warning(
            "The GPU failed while the memory of an optimizer that was not closed was freed: %s: %s. Call close() when "
            "an optimizer is no longer needed.",
            type(error).__name__,
            error,
        )


class CudaDevice:
    """Device for one GPU. `limit_bytes`: maximum of device memory that may be used; 0 for all memory of the GPU.

    Host buffers come from a pool and return to it when they are dropped. Before a host buffer is dropped, or device
    memory is freed with `free`, all work on it must be done. `close` waits for copies in progress. A device that is
    dropped without `close` waits for all lanes, and frees its memory.
    """

    kind: DeviceKind = "cuda"

    def __init__(self, runtime: CudaRuntime, limit_bytes: int = 0) -> None:
        self._runtime = runtime
        self._lanes = LaneStreams(runtime)
        self._clock = HostClock(runtime)
        self._host = PinnedPool(runtime, self._lanes.wait_for_copies)
        self._allocated: set[int] = set()
        """Addresses of allocated device memory."""
        weakref.finalize(self, _clean_up_unclosed, runtime, self._lanes, self._allocated, os.getpid()).atexit = False
        capacity = runtime.capacity_bytes()
        self.capacity_bytes = min(limit_bytes, capacity) if limit_bytes else capacity

    @property
    def in_use_bytes(self) -> int:
        return self._runtime.in_use_bytes()

    def take_peak_bytes(self) -> int:
        return self._runtime.take_peak_bytes()

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        """Allocates device memory and returns its address. Lanes must wait for `now()` before they use the memory.
        Raises MemoryBudgetError if it does not fit."""
        free = self.capacity_bytes - self.in_use_bytes
        reason: MemoryError | None = None
        if nbytes <= free:
            try:
                address = self._runtime.alloc(nbytes)
                self._allocated.add(address)
                return address
            except MemoryError as error:
                reason = error
        raise MemoryBudgetError(
            f"{nbytes:,} bytes do not fit in device memory: {max(free, 0):,} of {self.capacity_bytes:,} are not in "
            f"use{', but too fragmented' if reason else ''}. Lower static_ratio, use smaller subgroups or fewer slots.",
            nbytes, free,
        ) from reason  # fmt: skip

    def free(self, address: int) -> None:
        self._allocated.remove(address)
        self._runtime.free(address)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self._host.take(nbytes)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Does nothing: the framework's allocator counts the tensor already."""

    # ---- order

    def now(self) -> Event:
        marker = self._runtime.record(self._runtime.current_stream())
        return StreamWork(self._runtime, self._clock, self._clock.anchor, marker, marker)

    def mark(self) -> Event:
        anchor, marker = self._clock.fresh(), self._runtime.record(self._runtime.current_stream(), timed=True)
        return StreamWork(self._runtime, self._clock, anchor, marker, marker)

    def block(self, event: Event) -> None:
        if isinstance(event, StreamWork):
            self._runtime.stream_waits(self._runtime.current_stream(), event.end)
        else:
            event.wait()

    def wait(self, lane: str, event: Event) -> None:
        if isinstance(event, StreamWork):
            self._runtime.stream_waits(self._lanes[lane], event.end)
        else:
            event.wait()

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        self._runtime.used_by(tensor, self._lanes[lane])

    # ---- work

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event:
        anchor, stream = self._clock.fresh(), self._lanes[lane]
        start = self._runtime.record(stream, timed=True)
        self._runtime.copy(copies, lane == H2D, stream)
        return StreamWork(self._runtime, self._clock, anchor, start, self._runtime.record(stream, timed=True))

    def copy_task(self, lane: str, copies: Callable[[], Sequence[Copy]]) -> None:
        """None: `copy` enqueues the copies on a stream."""

    def norms_task(self, grads: Callable[[], Sequence[GradRef]]) -> None:
        """None: `norms` enqueues the sums on a stream."""

    def update(self, runs: Sequence[UpdateRun]) -> Event:
        anchor, stream = self._clock.fresh(), self._lanes[DEVICE]
        start = self._runtime.record(stream, timed=True)
        self._runtime.update(runs, stream)
        return StreamWork(self._runtime, self._clock, anchor, start, self._runtime.record(stream, timed=True))

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, Norms]:
        """Enqueues the computation of a pair for each gradient: the sum of squares and the number of non-finite values.
        Returns an event and a list, which is filled with the pairs in the thread that waits for the event."""
        anchor, stream, found = self._clock.fresh(), self._lanes[DEVICE], Norms()
        start = self._runtime.record(stream, timed=True)
        read = self._runtime.norms(grads, stream)
        end = self._runtime.record(stream, timed=True)

        def fill() -> None:
            if len(found) < len(grads):
                found[:] = read()  # in one assignment: another thread that waited may be reading

        return StreamWork(self._runtime, self._clock, anchor, start, end, fill), found

    def close(self) -> None:
        """Waits for copies, and unpins and frees the host buffers that are not in use.

        All steps are run even if the GPU fails; then the first error is raised. If the wait for copies fails, the
        buffers are unpinned nevertheless, though copies from and to them may still be in progress.
        """
        try:
            close_all(self._lanes.wait_for_copies, self._host.close)
        finally:
            self._lanes.used = False
