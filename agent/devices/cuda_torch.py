"""CUDA runtime (`CudaRuntime`) implemented with PyTorch's calls.

The CUDA runtime library is not called directly, because each wheel of torch brings its own version of it, and because a
thread needs the right CUDA context before a call. torch's calls select the device, bind the context, check errors and
release the GIL. torch cannot copy by address, so memory is wrapped as tensors without a copy: device memory through
`__cuda_array_interface__`, host memory through the buffer protocol. A copy between such tensors with non_blocking=True
is one cudaMemcpyAsync on the current stream.

GPU 0 is the current device of a new thread. A call for another GPU from such a thread would create a context of
hundreds of megabytes on GPU 0: cudaEventSynchronize does so, and so does the end of `torch.cuda.stream`, which restores
the stream of the previous device. So each call to CUDA is made with this GPU as the current device, whatever thread
calls. Afterwards the previous device is current again; `torch.cuda.device` creates no context for it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch

from tidegate.agent.devices.base import Copy, GradRef, UpdateRun
from tidegate.agent.devices.cuda_runtime import Marker, Norms, Stream
from tidegate.agent.devices.gpu_kernels import load_kernels
from tidegate.agent.devices.pinned_memory import near_cpus
from tidegate.kernels import implementation
from tidegate.kernels.arithmetic.device_calls import GpuKernels
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.kernels.arithmetic.torch_kernels import CudaMemory

HOST_REGISTER_PORTABLE: Final = 1
"""The flag cudaHostRegisterPortable of CUDA's call cudaHostRegister: the memory is pinned for all CUDA contexts of the
process."""

HIGH_PRIORITY: Final = -1
"""Priority of the engine's streams."""


class EventPool:
    """Pool of reusable CUDA events, timed or not: creating and destroying an event takes longer than recording it, and
    a step has hundreds of them."""

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self._free: deque[torch.cuda.Event] = deque()
        """Events to reuse. An event comes back when its marker is garbage-collected, which can happen at any time in
        any thread, also inside `record`: a lock taken there could deadlock, so the deque is used without one."""

    def record(self, stream: Stream) -> PooledEvent:
        """Records an event behind the work now in `stream`."""
        try:
            event = self._free.pop()
        except IndexError:
            # blocking: a waiting thread frees its core for the update on the CPU.
            event = torch.cuda.Event(enable_timing=self._timed, blocking=True)
        event.record(stream)
        return PooledEvent(event, self._free)


class PooledEvent:
    """Recorded CUDA event, which returns to its pool when this object is garbage-collected."""

    __slots__ = ("_free", "event")

    def __init__(self, event: torch.cuda.Event, free: deque[torch.cuda.Event]) -> None:
        self.event, self._free = event, free

    def __del__(self) -> None:
        self._free.append(self.event)


class TorchCuda:
    """A `CudaRuntime` for the GPU `device`."""

    def __init__(
        self, device: torch.device, kernels: GpuKernels | None = None, rule: Implementation | None = None
    ) -> None:
        """`kernels`: None for those of the update rule `rule`, which is AdamW for None."""
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._kernels = kernels or load_kernels(self.device, rule or implementation("adamw"))
        self._events, self._timed_events = EventPool(timed=False), EventPool(timed=True)
        self._blocks: dict[int, torch.Tensor] = {}
        free, _ = torch.cuda.mem_get_info(self.device)
        self._capacity = free + torch.cuda.memory_reserved(self.device)

    def _this_gpu(self) -> torch.cuda.device:
        """Context manager in which this GPU is the current device of the calling thread."""
        return torch.cuda.device(self.device.index)

    # ---- order

    def new_stream(self, name: str) -> Stream:
        return torch.cuda.Stream(self.device, priority=HIGH_PRIORITY)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Stream, timed: bool = False) -> Marker:
        with self._this_gpu():
            return (self._timed_events if timed else self._events).record(stream)

    def stream_waits(self, stream: Stream, marker: Marker) -> None:
        with self._this_gpu():
            stream.wait_event(marker.event)

    def host_waits(self, marker: Marker) -> None:
        with self._this_gpu():
            marker.event.synchronize()

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        with self._this_gpu():
            return float(earlier.event.elapsed_time(later.event)) / 1e3

    # ---- work

    def copy(self, copies: Sequence[Copy], to_device: bool, stream: Stream) -> None:
        with self._this_gpu(), torch.cuda.stream(stream):
            for one in copies:
                if not one.nbytes:
                    continue
                if to_device:
                    self._on_device(one.dst, one.nbytes).copy_(_on_host(one.src, one.nbytes), non_blocking=True)
                else:
                    _on_host(one.dst, one.nbytes).copy_(self._on_device(one.src, one.nbytes), non_blocking=True)

    def update(self, runs: Sequence[UpdateRun], stream: Stream) -> None:
        with self._this_gpu(), torch.cuda.stream(stream):
            self._kernels.update(runs)

    def norms(self, grads: Sequence[GradRef], stream: Stream) -> Callable[[], Norms]:
        if not grads:
            return Norms
        # Temporary tensors come from this stream's allocator pool: their memory is reused only behind their last use.
        with self._this_gpu(), torch.cuda.stream(stream):
            sums = torch.empty(len(grads), dtype=torch.float64, device=self.device)
            bad = torch.empty(len(grads), dtype=torch.int64, device=self.device)
            self._kernels.sum_of_squares(grads, sums, bad)
            found = [
                torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in (sums, bad)
            ]
        return lambda: list(zip(found[0].tolist(), found[1].tolist(), strict=True))

    def _on_device(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(CudaMemory(address, nbytes), device=self.device)

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        try:
            block = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, address: int) -> None:
        del self._blocks[address]

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def pin(self, address: int, nbytes: int) -> str:
        with self._this_gpu():
            result = torch.cuda.cudart().cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE)
            if int(result) == 0:
                return ""
            self._forget_error()
        return f"cudaHostRegister: {torch.cuda.cudart().cudaGetErrorString(result)}"

    def unpin(self, address: int) -> None:
        with self._this_gpu():
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        """Clears the CUDA runtime's last error in this thread. torch would read this error after its next kernel and
        raise it there, so a small kernel is launched here and its error is ignored."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device).add_(1)

    def capacity_bytes(self) -> int:
        return self._capacity

    def in_use_bytes(self) -> int:
        return self._allocated_bytes("current")

    def take_peak_bytes(self) -> int:
        peak = self._allocated_bytes("peak")
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _allocated_bytes(self, which: Literal["current", "peak"]) -> int:
        """Bytes that torch's allocator has given out: now, or at their peak. The values are those of
        `torch.cuda.memory_allocated` and `max_memory_allocated`. Both functions build and sort a list of all
        statistics, which takes over 0.1 ms, and the peak is read at the end of every phase."""
        statistics = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(statistics["allocated_bytes"]["all"][which])

    def near_cpus(self) -> frozenset[int]:
        properties: Any = torch.cuda.get_device_properties(self.device)
        try:
            place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        except AttributeError:  # torch before 2.7 lacks these fields
            return frozenset()
        return near_cpus("{:04x}:{:02x}:{:02x}.0".format(*place))


def _on_host(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
