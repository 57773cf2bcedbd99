"""The fake CUDA runtime with a framework that enqueues its work far ahead of the GPU.

Whatever anybody enqueues is done when a host thread waits for it, and not before: so far may a host be ahead. Memory
that the framework gives up is in use until the streams that it was held for have done what they hold by then, as in
PyTorch's allocator. What is given up without a hold is free at once: the framework's own stream is in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.agent.devices.fake_cuda import FakeCuda, FakeStream
from tests.agent.devices.vector_clocks import Clock, Range
from tidegate.agent.devices.base import Copy, GradRef, UpdateRun
from tidegate.agent.devices.cuda_runtime import Norms


class RunsAhead(FakeCuda):
    """See the module."""

    def __init__(self, seed: int = 0, memory_bytes: int = 1 << 30) -> None:
        self._given: set[Range] = set()
        """Memory of tensors that the framework has."""
        self._leaving: list[tuple[int, list[tuple[FakeStream, int]]]] = []
        """Bytes that it gave up, and how far streams must get before they are free."""
        self._last_work: dict[str, int] = {}
        """By stream: the place behind its last copy or kernel. Markers behind that take no time."""
        self.most_framework_bytes = 0
        self.taken = 0
        """How often device memory was taken or host memory was pinned."""
        super().__init__(seed, eagerness=0.0, memory_bytes=memory_bytes)

    def framework_access(self, tensor: torch.Tensor, write: bool, what: str) -> None:
        super().framework_access(tensor, write, what)
        if what == "making a tensor":
            with self._mutex:
                start = tensor.data_ptr()
                self._given.add((start, start + tensor.numel() * tensor.element_size()))
                self._leaving = [(n, held) for n, held in self._leaving if any(s.done < place for s, place in held)]
                in_use = sum(end - start for start, end in self._given) + sum(nbytes for nbytes, _ in self._leaving)
                self.most_framework_bytes = max(self.most_framework_bytes, in_use)

    def alloc(self, nbytes: int) -> int:
        self.taken += 1
        return super().alloc(nbytes)

    def pin(self, address: int, nbytes: int) -> str:
        self.taken += 1
        return super().pin(address, nbytes)

    def framework_works(self, seconds: float) -> Callable[[], float | None]:
        """The framework enqueues a kernel that takes its time. Gives when it was done; None before."""
        done: list[float] = []

        def kernel() -> None:
            time.sleep(seconds)
            done.append(time.monotonic())

        with self._mutex:
            self._enqueue(self._framework, kernel)
        return lambda: done[0] if done else None

    def copy(self, copies: Sequence[Copy], to_device: bool, stream: FakeStream) -> None:
        with self._mutex:
            super().copy(copies, to_device, stream)
            self._last_work[stream.name] = stream.end

    def update(self, runs: Sequence[UpdateRun], stream: FakeStream) -> None:
        with self._mutex:
            super().update(runs, stream)
            self._last_work[stream.name] = stream.end

    def norms(self, grads: Sequence[GradRef], stream: FakeStream) -> Callable[[], Norms]:
        with self._mutex:
            read = super().norms(grads, stream)
            self._last_work[stream.name] = stream.end
            return read

    def _enqueue(self, stream: FakeStream, work: Callable[[], None]) -> None:
        if stream is not self._framework:
            super()._enqueue(stream, work)
        elif self.error is None:
            stream.queue.append(work)

    def _give_up(self, clock: Clock, address: int, nbytes: int, storage: Any = None) -> None:
        held = {m.stream.name: m.stream for m in self._held.get((address, address + nbytes), ())}
        super()._give_up(clock, address, nbytes, storage)
        if (address, address + nbytes) in self._given:
            self._given.discard((address, address + nbytes))
            self._leaving.append((nbytes, [(stream, self._last_work[name]) for name, stream in held.items()]))
