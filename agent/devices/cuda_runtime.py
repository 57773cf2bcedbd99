"""The calls that the CUDA device makes, and no others: a seam narrow enough for a fake that checks their order.

agent/devices/cuda_torch.py makes them through PyTorch. The fake of the tests records every one of them, delays work as
long as it may, and finds accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from tidegate.agent.devices.base import Copy, GradRef, UpdateRun

Stream: TypeAlias = Any
"""A queue of work on the GPU. Only the runtime that made it looks inside."""

Marker: TypeAlias = Any
"""A place in a stream: reached when all work before it is done. One that is timed carries when that was."""

Norms: TypeAlias = list[tuple[float, int]]


class CudaRuntime(Protocol):
    """One GPU. Calls that take a stream enqueue work there and return; any thread may make them."""

    def new_stream(self, name: str) -> Stream: ...

    def current_stream(self) -> Stream:
        """The stream on which the framework enqueues what the calling thread asks for."""

    def record(self, stream: Stream, timed: bool = False) -> Marker:
        """Marks the end of what `stream` holds now. `timed`: `seconds_between` will be asked for."""

    def stream_waits(self, stream: Stream, marker: Marker) -> None:
        """What is enqueued on `stream` from now on begins when `marker` was reached."""

    def host_waits(self, marker: Marker) -> None:
        """Blocks the calling thread until `marker` was reached, without the interpreter's lock."""

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        """On the GPU's clock. Both are `timed` and must have been reached."""

    def copy(self, copies: Sequence[Copy], to_device: bool, stream: Stream) -> None: ...

    def update(self, runs: Sequence[UpdateRun], stream: Stream) -> None: ...

    def norms(self, grads: Sequence[GradRef], stream: Stream) -> Callable[[], Norms]:
        """The result is to be asked for once a marker behind this work was reached."""

    def alloc(self, nbytes: int) -> int:
        """Device memory, in order with the framework's current stream: what that stream holds may still use it.
        MemoryError when there is none."""

    def free(self, address: int) -> None:
        """The framework may use this memory at once: all work on it must be done."""

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The framework does not use the memory of `tensor` again before what `stream` holds now is done."""

    def pin(self, address: int, nbytes: int) -> str:
        """Lets the GPU copy from and to these pages on its own; else the reason why not. Empty when it worked."""

    def unpin(self, address: int) -> None:
        """All work on these pages must be done."""

    def capacity_bytes(self) -> int:
        """Device memory that this process can have."""

    def in_use_bytes(self) -> int: ...

    def take_peak_bytes(self) -> int:
        """Highest `in_use_bytes` since the last call."""

    def near_cpus(self) -> frozenset[int]:
        """CPUs of the host memory next to this GPU; empty when all are alike or nobody knows."""
