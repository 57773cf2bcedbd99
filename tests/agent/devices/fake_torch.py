"""`torch.cuda` without a GPU, for agent/devices/cuda_torch.py: threads have a current device, devices have contexts.

`torch.cuda.device` and `torch.cuda.stream` are the installed torch's own, and so is what they do to the current device.
What torch does in C++ is here as its sources have it (c10/cuda/CUDAEvent.h, CUDAFunctions.cpp): a call that sets no
device makes a context on the current one, and so does `cudaSetDevice`. Memory is the CPU's and work is done at once.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidegate.agent.devices import cuda_torch
from tidegate.agent.devices.base import GradRef, UpdateRun
from tidegate.kernels import ThreadPool, sum_of_squares


class StickyError(RuntimeError):
    """What every call raises once a kernel has gone wrong."""


class FakeDriver:
    """Current devices and contexts. `broken`: from now on every call fails."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.broken = ""
        self.failed_calls = 0
        self.events_made = 0
        self.registered: dict[int, int] = {}
        self.refuse_pin = 0
        """The error that registering host memory gives; 0 for none."""
        self._here = threading.local()
        self._streams = itertools.count(1)

    # ---- CUDAFunctions.cpp

    @property
    def current(self) -> int:
        return getattr(self._here, "current", 0)

    def set_device(self, index: int) -> None:
        self._here.target, self._here.current = -1, index
        self.contexts.add(index)

    def exchange_device(self, index: int) -> int:
        target: int = getattr(self._here, "target", -1)
        before = self.current if target < 0 else target
        self._here.target = -1
        if before != index:
            self.set_device(index)
        return before

    def maybe_exchange_device(self, index: int) -> int:
        before = self.current
        if before != index:
            if index in self.contexts:
                self.set_device(index)
            else:
                self._here.target = index
        return before

    @contextmanager
    def guard(self, index: int) -> Iterator[None]:
        """CUDAGuard."""
        before = self.exchange_device(index)
        try:
            yield
        finally:
            self.maybe_exchange_device(before)

    def call(self) -> None:
        """Any call that needs a context."""
        if self.broken:
            self.failed_calls += 1
            raise StickyError(f"{self.broken} ({self.failed_calls})")
        self.contexts.add(self.current)

    def guarded_call(self, index: int) -> None:
        with self.guard(index):
            self.call()

    def launch(self) -> None:
        """A kernel of anybody's. The runtime keeps a thread's last error, and the launch is said to have failed of it
        (C10_CUDA_KERNEL_LAUNCH_CHECK)."""
        self.call()
        error, self._here.last_error = getattr(self._here, "last_error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error: error {error}")

    # ---- streams

    def current_stream(self, device: Any = None) -> FakeStream:
        index = _index(device, self)
        return self._current_streams().setdefault(index, FakeStream(self, index, 0))

    def set_stream(self, stream: FakeStream) -> None:
        """THCPModule_setStream_wrap."""
        if stream.device_index != self.current:
            self.set_device(stream.device_index)
        self._current_streams()[stream.device_index] = stream

    def new_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        index = _index(device, self)
        self.guarded_call(index)
        return FakeStream(self, index, next(self._streams))

    def _current_streams(self) -> dict[int, FakeStream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = {}
        streams: dict[int, FakeStream] = self._here.streams
        return streams

    # ---- cudart

    def register(self, address: int, nbytes: int, _flags: int) -> int:
        self.call()
        if self.refuse_pin:
            self._here.last_error = self.refuse_pin
            return self.refuse_pin
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]  # tried, that is
        self.call()
        return 0


class FakeStream:
    def __init__(self, driver: FakeDriver, index: int, stream_id: int) -> None:
        self._driver, self.device_index, self.stream_id = driver, index, stream_id
        self.device = torch.device("cuda", index)

    def wait_event(self, event: FakeEvent) -> None:
        if event.device_index is not None:
            self._driver.guarded_call(self.device_index)


class FakeEvent:
    """Made on the device of the stream that it is first recorded on. Reached at once."""

    def __init__(self, driver: FakeDriver, enable_timing: bool = False, blocking: bool = False) -> None:
        self._driver, self._timed = driver, enable_timing
        self.device_index: int | None = None
        self._seconds = 0.0

    def record(self, stream: FakeStream) -> None:
        if self.device_index is None:
            self.device_index = stream.device_index
            self._driver.events_made += 1
        assert self.device_index == stream.device_index, "an event stays on its device"
        self._driver.guarded_call(self.device_index)
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        if self.device_index is not None:
            self._driver.call()  # no guard

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self._timed, "made without timing"
        assert later._timed, "made without timing"
        assert self.device_index is not None, "never recorded"
        self._driver.call()  # query, no guard
        self._driver.guarded_call(self.device_index)
        return (later._seconds - self._seconds) * 1e3


class FakeTorch:
    """The module `torch` as cuda_torch.py sees it: tensors on a GPU are the CPU's."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _make(
        self, make: Any, *args: Any, device: Any = None, pin_memory: bool = False, **options: Any
    ) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            self._driver.guarded_call(_index(device, self._driver))
        elif pin_memory:
            self._driver.call()
        return make(*args, **options)  # type: ignore[no-any-return]

    def empty(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._make(torch.empty, *args, **options)

    def ones(self, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            with self._driver.guard(_index(device, self._driver)):
                self._driver.launch()
        return torch.ones(*args, **options)

    def empty_like(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._make(torch.empty_like, *args, **options)

    def as_tensor(self, data: Any, device: Any) -> torch.Tensor:
        """Asks the driver which device the address is of, without a guard."""
        self._driver.call()
        told = data.__cuda_array_interface__
        (nbytes,), (address, _) = told["shape"], told["data"]
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class FakeKernels:
    """What works on the current stream, of the current device."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self._pool = driver, ThreadPool(1)

    def update(self, runs: Sequence[UpdateRun]) -> None:
        self._driver.launch()
        for run in runs:
            run.apply(self._pool)

    def sum_of_squares(self, refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
        self._driver.launch()
        for i, ref in enumerate(refs):
            out_sums[i], out_bad[i] = sum_of_squares(self._pool, ref.address, ref.numel, ref.dtype)


@contextmanager
def fake_torch() -> Iterator[FakeDriver]:
    """Inside, cuda_torch.py works on GPUs that are not there."""
    driver = FakeDriver()
    cudart = SimpleNamespace(
        cudaHostRegister=driver.register,
        cudaHostUnregister=driver.unregister,
        cudaGetErrorString=lambda code: f"error {int(code)}",
    )
    on_cuda = {
        "_exchange_device": driver.exchange_device,
        "_maybe_exchange_device": driver.maybe_exchange_device,
        "set_device": driver.set_device,
        "current_device": lambda: driver.current,
        "current_stream": driver.current_stream,
        "set_stream": driver.set_stream,
        "is_available": lambda: True,
        "Stream": driver.new_stream,
        "Event": lambda **options: FakeEvent(driver, **options),
        "cudart": lambda: cudart,
        "mem_get_info": lambda device: (driver.guarded_call(_index(device, driver)), (1 << 30, 1 << 30))[1],
        "memory_reserved": lambda device: 0,
        "memory_stats_as_nested_dict": lambda device: {"allocated_bytes": {"all": {"current": 0, "peak": 0}}},
        "reset_peak_memory_stats": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in on_cuda.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(cuda_torch, "torch", FakeTorch(driver))
        yield driver


def _index(device: Any, driver: FakeDriver) -> int:
    if device is None:
        return driver.current
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return driver.current if index is None else index
