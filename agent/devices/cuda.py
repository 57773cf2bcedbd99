"""The CUDA device: a stream a lane, events between them, pinned host memory, device memory from torch's allocator.

Every call that enqueues work returns at once. What orders one stream's work with another's, or with the host's, is an
event that somebody waits for, and nothing else; tests/agent/test_cuda_order.py drops each of these waits in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tidegate.agent.devices.base import Copy, Event, GradRef, UpdateRun
from tidegate.agent.devices.cuda_runtime import CudaRuntime, Marker, Norms
from tidegate.agent.devices.pieces import in_pieces
from tidegate.agent.devices.pinned import PinnedPool
from tidegate.errors import MemoryBudgetError
from tidegate.plan.ops import D2H, DEVICE, H2D
from tidegate.wire.base import DeviceKind

ANCHOR_SECONDS: Final = 10.0
"""Times between events come as fp32 milliseconds and two clocks drift: after this long they are compared anew."""

ANCHOR_TRIES: Final = 4


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
        self.anchor = self._compare()

    def seconds(self, anchor: Anchor, marker: Marker) -> float:
        """`anchor`: one that was taken before `marker` was recorded. `marker` must have been reached."""
        return anchor.seconds + self._runtime.seconds_between(anchor.marker, marker)

    def refresh(self) -> None:
        """To be called where the GPU has little to do."""
        if time.monotonic() - self.anchor.seconds > ANCHOR_SECONDS:
            self.anchor = self._compare()

    def _compare(self) -> Anchor:
        """The best of a few: the first has to wake up the GPU, any may be interrupted."""
        return min((self._compare_once() for _ in range(ANCHOR_TRIES)), key=lambda anchor: anchor.error_seconds)

    def _compare_once(self) -> Anchor:
        before = time.monotonic()
        marker = self._runtime.record(self._stream)
        self._runtime.host_waits(marker)
        after = time.monotonic()
        return Anchor(marker, (before + after) / 2, (after - before) / 2)


class Work:
    """Work on a stream, between two markers. `done` is called by every thread that has waited for it."""

    __slots__ = ("_anchor", "_clock", "_done", "_runtime", "end", "start")

    def __init__(
        self, runtime: CudaRuntime, clock: HostClock, start: Marker, end: Marker, done: Callable[[], None] | None = None
    ) -> None:
        self._runtime, self._clock, self._anchor = runtime, clock, clock.anchor
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


class CudaDevice:
    """One GPU. `limit_bytes` bounds device memory further than the GPU does; 0 for no such bound.

    Host buffers come from a pool and go back to it when nobody holds them: whoever lets one go has waited for the work
    on it. `free` takes the same for granted; `close` waits for copies that are on their way.
    """

    def __init__(self, runtime: CudaRuntime, limit_bytes: int = 0) -> None:
        self._runtime = runtime
        self._streams = {lane: runtime.new_stream(lane) for lane in (H2D, D2H, DEVICE)}
        self._clock = HostClock(runtime)
        self._host = PinnedPool(runtime)
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
                return self._runtime.alloc(nbytes)
            except MemoryError as error:
                reason = error
        raise MemoryBudgetError(
            f"{nbytes:,} bytes do not fit in device memory: {max(free, 0):,} of {self.capacity_bytes:,} are not in "
            f"use{', but too scattered' if reason else ''}. Lower static_ratio, use smaller subgroups or fewer slots.",
            nbytes, free,
        ) from reason  # fmt: skip

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self._host.take(nbytes)

    def adopt(self, tensor: torch.Tensor) -> None:
        """The framework's allocator counts it already."""

    # ---- order

    def now(self) -> Event:
        marker = self._runtime.record(self._runtime.current_stream())
        return Work(self._runtime, self._clock, marker, marker)

    def mark(self) -> Event:
        return self.now()

    def block(self, event: Event) -> None:
        if isinstance(event, Work):
            self._runtime.stream_waits(self._runtime.current_stream(), event.end)
        else:
            event.wait()

    def wait(self, lane: str, event: Event) -> None:
        if isinstance(event, Work):
            self._runtime.stream_waits(self._streams[lane], event.end)
        else:
            event.wait()

    def used_by(self, lane: str, tensor: torch.Tensor) -> None:
        self._runtime.used_by(tensor, self._streams[lane])

    # ---- work

    def copy(self, lane: str, copies: Sequence[Copy]) -> Event:
        stream = self._streams[lane]
        start = self._runtime.record(stream)
        self._runtime.copy(in_pieces(copies), lane == H2D, stream)
        return Work(self._runtime, self._clock, start, self._runtime.record(stream))

    def update(self, runs: Sequence[UpdateRun]) -> Event:
        stream = self._streams[DEVICE]
        start = self._runtime.record(stream)
        self._runtime.update(runs, stream)
        return Work(self._runtime, self._clock, start, self._runtime.record(stream))

    def norms(self, grads: Sequence[GradRef]) -> tuple[Event, Norms]:
        """The list is filled by the thread that waits for the event."""
        stream, found = self._streams[DEVICE], Norms()
        start = self._runtime.record(stream)
        read = self._runtime.norms(grads, stream)
        end = self._runtime.record(stream)

        def fill() -> None:
            found[:] = read()  # at once: another thread that has waited, too, may be reading

        return Work(self._runtime, self._clock, start, end, fill), found

    def close(self) -> None:
        """Whatever failed before may have left copies behind, from and to pages that are unpinned now."""
        for lane in (H2D, D2H):
            self._runtime.host_waits(self._runtime.record(self._streams[lane]))
        self._host.close()
