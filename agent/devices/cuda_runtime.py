"""Interface of the calls that the CUDA device makes, so that tests can replace them with a fake that checks their
order.

agent/devices/cuda_torch.py makes the calls through PyTorch. The fake of the tests records each call, delays work as
long as possible, and finds accesses that no event orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from tidegate.agent.devices.base import Copy, GradRef, UpdateRun

Stream: TypeAlias = Any
"""A CUDA stream. Only the runtime that made it uses its content."""

Marker: TypeAlias = Any
"""A CUDA event in a stream: reached when all work before it is done. A timed marker also has the time at which it was
reached."""

Norms: TypeAlias = list[tuple[float, int]]
"""Sum of squares and number of non-finite values of each gradient."""


class CudaRuntime(Protocol):
    """Calls to one GPU. Calls with a stream enqueue work there and return; any thread may make them."""

    def new_stream(self, name: str) -> Stream: ...

    def current_stream(self) -> Stream:
        """The stream on which the framework enqueues work of the calling thread."""

    def record(self, stream: Stream, timed: bool = False) -> Marker:
        """Records a marker behind the work now in `stream`. `timed`: the marker can be used with `seconds_between`."""

    def stream_waits(self, stream: Stream, marker: Marker) -> None:
        """Makes work that is enqueued on `stream` from now on begin after `marker` was reached."""

    def host_waits(self, marker: Marker) -> None:
        """Blocks the calling thread until `marker` is reached, without holding the GIL."""

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        """Seconds between two markers on the GPU's clock. Both must be `timed` and reached."""

    def copy(self, copies: Sequence[Copy], to_device: bool, stream: Stream) -> None: ...

    def update(self, runs: Sequence[UpdateRun], stream: Stream) -> None: ...

    def norms(self, grads: Sequence[GradRef], stream: Stream) -> Callable[[], Norms]:
        """Enqueues the computation of the sum of squares and the number of non-finite values of each gradient. Returns
        a function that gives these values; it may be called only after a marker behind this work was reached."""

    def alloc(self, nbytes: int) -> int:
        """Allocates device memory and returns its address. Earlier work of the framework's current stream may still use
        this memory: work of other streams must wait for it. Raises MemoryError if there is not enough memory."""

    def free(self, address: int) -> None:
        """Frees device memory, which the framework may reuse at once: all work on it must be done."""

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps the memory of `tensor` from being reused before the work now in `stream` is done."""

    def pin(self, address: int, nbytes: int) -> str:
        """Pins host pages, so that the GPU copies from and to them without the CPU. Returns the reason when it failed,
        "" on success."""

    def unpin(self, address: int) -> None:
        """Unpins pages. All work on them must be done."""

    def capacity_bytes(self) -> int:
        """Device memory in bytes that this process can use."""

    def in_use_bytes(self) -> int: ...

    def take_peak_bytes(self) -> int:
        """Highest `in_use_bytes` since the last call."""

    def near_cpus(self) -> frozenset[int]:
        """CPUs of the NUMA node next to this GPU; an empty set if the host has one node only, or if the node is
        unknown."""
