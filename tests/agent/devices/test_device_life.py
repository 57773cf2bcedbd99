"""The end of a CUDA device, however it comes: work is waited for, host memory is unpinned, and then its pages go."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable

import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda
from tests.agent.devices.fake_memory import dies_of, read_byte
from tests.agent.devices.fake_training import watched
from tests.agent.engine.test_exactness import make_params, random_grads
from tidegate.agent.devices.base import Copy, GradRef
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.optimizer import engine_builder
from tidegate.kernels import GradDtype
from tidegate.plan.ops import D2H, DEVICE, H2D

SHAPES = [((40, 3), 0), ((77,), 1), ((130,), 0)]


def copying(fake: FakeCuda) -> CudaDevice:
    """A device with copies on the way in both directions, between buffers that nobody else holds."""
    device = CudaDevice(fake)
    there, back = device.host_buffer(64), device.host_buffer(64)
    first, second = device.alloc(64), device.alloc(64)
    for lane in (H2D, D2H):
        device.wait(lane, device.now())
    device.copy(H2D, [Copy(first, there.data_ptr(), 64)])
    device.copy(D2H, [Copy(back.data_ptr(), second, 64)])
    return device


def summing(fake: FakeCuda) -> CudaDevice:
    """A device at work on memory that nobody frees."""
    device = CudaDevice(fake)
    address = device.alloc(400)
    device.wait(DEVICE, device.now())
    device.norms([GradRef(address, 100, GradDtype.F32)])
    return device


def test_a_buffer_that_is_held_when_its_device_is_closed_is_unpinned_when_it_is_let_go() -> None:
    fake = FakeCuda()
    device = CudaDevice(fake)
    held, returned = device.host_buffer(100), device.host_buffer(100)
    del returned
    device.close()
    assert list(fake.pinned) == [held.data_ptr()]
    held.fill_(1)  # its pages are there
    del held
    assert not fake.pinned


def test_a_buffer_outlives_its_device() -> None:
    fake = FakeCuda()
    device = CudaDevice(fake)
    held = device.host_buffer(100)
    del device
    gc.collect()
    held.fill_(1)
    assert list(fake.pinned) == [held.data_ptr()]
    del held
    assert not fake.pinned


@pytest.mark.parametrize("busy", [copying, summing])
def test_a_device_that_is_collected_waits_for_its_lanes_first(busy: Callable[[FakeCuda], CudaDevice]) -> None:
    fake = FakeCuda(eagerness=0.0)
    device = busy(fake)
    del device
    gc.collect()
    assert fake.error is None
    assert not fake.pinned
    assert not fake.in_use_bytes(), "device memory is given back, too"


def test_an_optimizer_that_is_dropped_leaves_nothing_registered() -> None:
    """A cell of a notebook that is run again."""
    fake = FakeCuda(eagerness=0.0)
    params = make_params(SHAPES, 1)
    with watched(fake):
        optimizer = tidegate.AdamW(params, offload=tidegate.Offload(cpu_threads=1, stride=2.0, subgroup_numel=50))
        for step in range(2):
            for param, grad in zip(params, random_grads(params, step, some=False), strict=True):
                assert grad is not None
                fake.framework_access(grad, True, "the backward writing a gradient")
                param.grad = grad
            optimizer.step()
        assert fake.pinned
        del optimizer
        gc.collect()
    assert fake.error is None
    assert not fake.pinned
    assert not fake.in_use_bytes()


def test_a_device_is_closed_when_its_engine_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(engine_builder, "Engine", refused_after_a_buffer)
    with watched(fake), pytest.raises(ValueError, match="refused on purpose") as refused:
        tidegate.AdamW(make_params(SHAPES, 1))
    assert not fake.pinned, "while the traceback still holds the device"
    assert refused.tb is not None


def test_the_new_device_is_closed_when_the_engine_of_the_old_one_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model was converted, and all is built anew."""
    fake = FakeCuda()
    closed: list[CudaDevice] = []
    close = CudaDevice.close
    monkeypatch.setattr(CudaDevice, "close", lambda device: (closed.append(device), close(device))[1])
    with watched(fake):
        params = make_params(SHAPES, 1)
        optimizer = tidegate.AdamW(params, offload=tidegate.Offload(cpu_threads=1))
        of_engine = optimizer.engine.close
        monkeypatch.setattr(optimizer.engine, "close", failing_after(of_engine))
        for param in params:
            param.data = param.data.to(torch.bfloat16 if param.dtype is torch.float32 else torch.float32)
        with pytest.raises(ValueError, match="cannot be closed"):
            optimizer.state_dict()
    assert optimizer.device in closed
    assert len({id(device) for device in closed}) == 2
    assert not fake.pinned


def failing_after(close: Callable[..., None]) -> Callable[..., None]:
    def failing(*given: object) -> None:
        close(*given)
        raise ValueError("cannot be closed")

    return failing


def refused_after_a_buffer(_params: object, _layouts: object, device: CudaDevice, _rule: object, **_: object) -> None:
    device.host_buffer(100)
    raise ValueError("refused on purpose")


def test_a_fork_leaves_the_gpu_alone() -> None:
    fake = FakeCuda()
    device = CudaDevice(fake)
    held = [device.host_buffer(100)]
    before = dict(fake.pinned)
    child = os.fork()
    if child == 0:
        held.clear()
        del device
        gc.collect()
        os._exit(0 if fake.pinned == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_device_memory_is_no_memory_of_the_host() -> None:
    address = CudaDevice(FakeCuda()).alloc(100)
    assert dies_of(lambda: read_byte(address)) == signal.SIGSEGV
    assert dies_of(lambda: read_byte(torch.zeros(1).data_ptr())) == 0
