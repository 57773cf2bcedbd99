"""Gradient accumulation in host memory: the device holds no gradients between two backward passes of a step.

In each backward that is not the last of its step, a gradient that arrives is copied to the host and added to a sum, by
one thread at the same time as the backward; its device memory is then free. In the last backward the sums are copied
back, parameter by parameter, and added to the gradients.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Copy, Device, Event
from tidegate.agent.parameters.subgroups import GRAD_DTYPES, address_of, grad_dtype_of
from tidegate.errors import MemoryBudgetError
from tidegate.kernels import ThreadPool, accumulate
from tidegate.plan.ops import D2H, H2D

Accumulation = Literal["device", "host", "host_fp32"]

CHUNK_BYTES: Final = 32 << 20
"""Bytes of the host buffer into which parts of a gradient are copied before they are added to the sum. This memory is
needed in addition to the sums."""
MAX_WAITING: Final = 4
"""Maximum number of gradients that wait on the device to be copied. If there are more, the backward waits until the
oldest one is added to its sum."""


class HostSums:
    """Sums of gradients in host memory, by parameter number. The elements of a sum have the order of the weight's
    storage.

    pool: threads that do the additions. fp32: whether sums of 16-bit gradients are kept in fp32.
    """

    def __init__(self, device: Device, pool: ThreadPool, fp32: bool) -> None:
        self._device, self._pool, self._fp32 = device, pool, fp32
        self._sums: dict[int, torch.Tensor] = {}
        """Host buffers of the sums, by parameter. They are kept from step to step because pinning takes long."""
        self._last: dict[int, Future[None]] = {}
        """The last addition (finished or not) for each parameter that has a sum in this step."""
        self._returning: dict[int, Event] = {}
        """By parameter: the event at the end of the last copy of its sum to the device. Until then the buffer must not
        be changed."""
        self._staging: torch.Tensor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        """Guards the additions: autograd's threads start them, and the training thread may discard them."""
        self._thread = ThreadPoolExecutor(1, "tidegate-accumulate")

    def params(self) -> Sequence[int]:
        """Numbers of the parameters that have a sum."""
        return list(self._last)

    def allocate(self, param: int, weight: torch.Tensor) -> None:
        """Allocates the buffer of this parameter's sum before the backward, because pinning takes long. May be called
        only between steps."""
        if weight.numel():
            self._buffer(param, weight.numel(), self._dtype(grad_dtype_of(weight)))
            self._chunk()

    def add(self, param: int, dense: torch.Tensor) -> None:
        """Starts the addition of a gradient to the sum of its parameter. The gradient is read after the device work
        that the calling thread has enqueued so far, and is kept until it was copied.

        dense: the gradient, with its elements in the order of the weight's storage.

        Raises the error of an earlier addition, such as MemoryBudgetError.
        """
        self._device.adopt(dense)
        ready = self._device.now()
        with self._lock:
            before = self._last.get(param)
            done = self._last[param] = self._thread.submit(self._add, param, dense, ready, before)
            self._waiting.append(done)
            late = self._waiting.popleft() if len(self._waiting) > MAX_WAITING else None
        if late is not None:
            late.result()

    def take_to_device(self, param: int, weight: torch.Tensor) -> torch.Tensor | None:
        """Copies the sum of a parameter to the device, with the weight's strides, and removes the sum; None when the
        parameter has none. Device work that the calling thread enqueues next may use the result."""
        with self._lock:
            done = self._last.pop(param, None)
        if done is None:
            return None
        done.result()
        total = torch.empty_like(
            weight, dtype=self._dtype(grad_dtype_of(weight)), memory_format=torch.preserve_format, requires_grad=False
        )
        self._device.adopt(total)
        # Work that the framework has enqueued may still use the memory of the new tensor.
        self._device.wait(H2D, self._device.now())
        nbytes = total.numel() * total.element_size()
        if nbytes:
            event = self._device.copy(H2D, [Copy(address_of(total), self._sums[param].data_ptr(), nbytes)])
            self._device.block(event)
            self._returning[param] = event
        return total

    def discard(self) -> None:
        """Waits for the additions that are running, and drops all sums."""
        with self._lock:
            pending, self._last = list(self._last.values()), {}
            self._waiting.clear()
        for done in pending:
            done.exception()

    def host_bytes(self) -> int:
        """Bytes of host memory that the buffers of all sums take, including the buffer for copies."""
        buffers = [*tuple(self._sums.values()), *([] if self._staging is None else [self._staging])]
        return sum(buffer.numel() for buffer in buffers)

    def close(self) -> None:
        """Waits for the additions in progress, ends the thread that makes them, waits until the device has read all
        buffers, and frees them."""
        self.discard()
        self._thread.shutdown()
        try:
            close_all(*(event.wait for event in self._returning.values()))
        finally:
            self._sums.clear()
            self._staging = None

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._fp32 else dtype

    def _buffer(self, param: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if param not in self._sums:
            self._sums[param] = self._device.host_buffer(numel * dtype.itemsize)
        return self._sums[param]

    def _chunk(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = self._device.host_buffer(CHUNK_BYTES)
        return self._staging

    # ---- the thread

    def _add(self, param: int, dense: torch.Tensor, ready: Event, before: Future[None] | None) -> None:
        """Adds a gradient to its sum, when the event `ready` and the earlier addition `before` are done. Raises the
        error of `before` if it has failed, because an incomplete sum must not be used."""
        if before is not None:
            before.result()
        first = before is None
        returned = self._returning.pop(param, None)
        if returned is not None:
            returned.wait()
        self._device.wait(D2H, ready)
        dtype = self._dtype(dense.dtype)
        total = self._buffer(param, dense.numel(), dtype)
        if first and dtype == dense.dtype:
            self._copy(total, dense, 0, dense.numel())
            return
        if first:
            total.view(torch.float32).fill_(-0.0)  # -0.0 plus any number is this number
        staging = self._chunk()
        size = dense.element_size()
        for start in range(0, dense.numel(), CHUNK_BYTES // size):
            numel = min(CHUNK_BYTES // size, dense.numel() - start)
            self._copy(staging, dense, start, numel)
            accumulate(
                self._pool, total.data_ptr() + start * dtype.itemsize, GRAD_DTYPES[dtype],
                staging.data_ptr(), GRAD_DTYPES[dense.dtype], numel,
            )  # fmt: skip

    def _copy(self, to: torch.Tensor, dense: torch.Tensor, start: int, numel: int) -> None:
        size = dense.element_size()
        if numel:
            source = address_of(dense) + start * size
            self._device.copy(D2H, [Copy(to.data_ptr(), source, numel * size)]).wait()


def host_bytes(params: Sequence[torch.Tensor], accumulation: Accumulation) -> int:
    """Host memory in bytes for the sums of these parameters' gradients."""
    if accumulation == "device":
        return 0
    sizes = (p.numel() * (4 if accumulation == "host_fp32" else grad_dtype_of(p).itemsize) for p in params)
    return CHUNK_BYTES + sum(sizes)


def check_fits(params: Sequence[torch.Tensor], accumulation: Accumulation) -> None:
    """Raises MemoryBudgetError, with figures, if the sums of these parameters' gradients do not fit in host memory."""
    needed, available = host_bytes(params, accumulation), host_available_bytes()
    if needed > available:
        raise MemoryBudgetError(
            f"accumulation={accumulation!r} needs {needed:,} bytes of host memory for the sums of gradients, "
            f"{available:,} bytes are available. Use 'host' instead of 'host_fp32', or 'device'.",
            needed, available,
        )  # fmt: skip
