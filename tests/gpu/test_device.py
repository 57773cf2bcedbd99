"""What only a real GPU shows: overlap, pinned pages, budgets, and memory that the framework gives away."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import backward
from tests.gpu.on_gpu import GPU, Run, grads_on_gpu, params_on_gpu
from tidegate.agent.devices.base import Copy
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.errors import MemoryBudgetError
from tidegate.plan.ops import D2H, DEVICE, H2D
from tidegate.timeline.timeline import Span

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(TorchCuda(torch.device(GPU)))


def together(spans: tuple[Span, ...], one: str, other: str) -> float:
    """Seconds in which both lanes work."""
    pairs = itertools.product((s for s in spans if s.lane == one), (s for s in spans if s.lane == other))
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a, b in pairs)


# ---- overlap


def test_copies_in_updates_and_copies_out_overlap() -> None:
    params = params_on_gpu([((8_000_000,), torch.bfloat16)] * 8)
    grads = grads_on_gpu(params, 0)
    with Run(params, stride=1.0, subgroup_numel=8_000_000, num_slots=3) as run:
        for _ in range(3):
            run.optimizer.zero_grad()
            backward(params, grads)
            run.optimizer.step()
        lanes = {span.lane for span in run.spans}
        assert {H2D, D2H, DEVICE} <= lanes
        for one, other in ((H2D, D2H), (H2D, DEVICE), (D2H, DEVICE)):
            assert together(run.spans, one, other) > 0, f"{one} and {other} never work at once"


def test_both_directions_at_once_are_faster_than_one_after_the_other(device: CudaDevice) -> None:
    nbytes = 256 << 20
    there, back = device.host_buffer(nbytes), device.host_buffer(nbytes)
    first, second = device.alloc(nbytes), device.alloc(nbytes)
    for lane in (H2D, D2H):
        device.wait(lane, device.now())
    events = []
    for _ in range(4):
        events.append(device.copy(H2D, [Copy(first, there.data_ptr(), nbytes)]))
        events.append(device.copy(D2H, [Copy(back.data_ptr(), second, nbytes)]))
    for event in events:
        event.wait()
    spans = [event.span() for event in events]
    alone = sum(end - start for start, end in spans[2:])
    wall = max(end for _, end in spans) - min(start for start, _ in spans[2:])
    assert wall < 0.8 * alone


def test_copies_return_before_they_are_done(device: CudaDevice) -> None:
    """One of ten tries must succeed: other processes may interrupt this thread while it enqueues."""
    nbytes = 1 << 30
    buffer, address = device.host_buffer(nbytes), device.alloc(nbytes)
    device.wait(H2D, device.now())
    tries = []
    for _ in range(10):
        before = time.monotonic()
        event = device.copy(H2D, [Copy(address, buffer.data_ptr(), nbytes)])
        enqueued = time.monotonic() - before
        event.wait()
        start, end = event.span()
        tries.append(enqueued / (end - start))
        assert before - 0.001 < start < end < time.monotonic() + 0.001, "spans are on the host's clock"
    assert min(tries) < 0.5


def test_lanes_work_from_any_thread(device: CudaDevice) -> None:
    """A thread has no device and no context of its own to begin with."""
    buffer = device.host_buffer(1 << 20)
    buffer.fill_(7)
    address, back, failed = device.alloc(1 << 20), device.host_buffer(1 << 20), []
    device.wait(H2D, device.now())

    def work() -> None:
        try:
            device.wait(D2H, device.copy(H2D, [Copy(address, buffer.data_ptr(), 1 << 20)]))
            device.copy(D2H, [Copy(back.data_ptr(), address, 1 << 20)]).wait()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert (back == 7).all()


# ---- host memory


def test_host_buffers_are_pinned_until_the_device_is_closed(device: CudaDevice) -> None:
    buffer = device.host_buffer(10_000_000)
    assert buffer.is_pinned()
    assert not buffer.any()
    address = buffer.data_ptr()
    del buffer
    gc.collect()
    again = device.host_buffer(10_000_000)
    assert again.data_ptr() == address
    view = again[:100]
    device.close()
    assert view.is_pinned(), "somebody holds it"


def test_a_failed_pin_does_no_harm_to_what_comes_after() -> None:
    """The runtime keeps the error, and would blame the next kernel for it."""
    runtime = TorchCuda(torch.device(GPU))
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    assert runtime.pin(buffer.data_ptr(), buffer.numel()) == ""
    assert "cudaHostRegister" in runtime.pin(buffer.data_ptr(), buffer.numel())
    assert float(torch.ones(3, device=GPU).sum()) == 3.0
    runtime.unpin(buffer.data_ptr())
    runtime.unpin(buffer.data_ptr())
    assert float(torch.ones(3, device=GPU).sum()) == 3.0


def test_pageable_memory_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCuda, "pin", lambda *_: "refused by a test")
    params = params_on_gpu([((300, 301), torch.bfloat16)])
    with Run(params, stride=2.0, static_ratio=0.25, subgroup_numel=10_000) as run:
        for step in range(4):
            run.train(grads_on_gpu(params, step))
            run.check()


# ---- device memory


def test_what_does_not_fit_is_refused(device: CudaDevice) -> None:
    assert 0 < device.capacity_bytes <= torch.cuda.get_device_properties(GPU).total_memory
    with pytest.raises(MemoryBudgetError, match="do not fit in device memory"):
        device.alloc(device.capacity_bytes + 1)
    params = params_on_gpu([((1_000_000,), torch.float32)])
    small = tidegate.Offload(static_ratio=1.0, subgroup_numel=100_000, device_memory_bytes=9_000_000)
    with pytest.raises(MemoryBudgetError, match="static_ratio up to"):
        tidegate.AdamW(params, offload=small)


def test_state_is_counted_with_the_frameworks_memory_and_comes_back() -> None:
    params = params_on_gpu([((1_000_000,), torch.float32)])
    gc.collect()
    before = torch.cuda.memory_allocated()
    with Run(params, static_ratio=1.0, subgroup_numel=100_000) as run:
        run.train(grads_on_gpu(params, 0))
        run.optimizer.zero_grad()
        gc.collect()
        assert run.optimizer.device.in_use_bytes == torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() - before >= 8_000_000
        assert run.optimizer.device.take_peak_bytes() >= torch.cuda.memory_allocated()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1_000_000


@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_memory_that_the_framework_gives_away_at_once(gradients: str) -> None:
    """The next who gets it fills it with NaN, on the framework's stream, while lanes may still copy."""
    params = params_on_gpu([((500_000,), torch.bfloat16)] * 6 + [((70_001,), torch.float32)] * 3)

    def spoil(*_: object) -> None:
        for numel in (500_000, 70_001):
            for dtype in (torch.bfloat16, torch.float32):
                torch.full((numel,), float("nan"), dtype=dtype, device=GPU)

    with Run(params, stride=2.0, static_ratio=0.2, subgroup_numel=100_000, gradients=gradients) as run:
        hooks = [p.register_post_accumulate_grad_hook(spoil) for p in params]
        for step in range(6):
            grads = grads_on_gpu(params, step)
            if gradients == "keep":  # a backward whose gradients are thrown away while they are copied
                backward(params, grads_on_gpu(params, 1000 + step))
                for p in params:
                    p.grad = None
                    spoil()
            run.train(grads)
            run.optimizer.zero_grad()
            spoil()
            run.check()
        for hook in hooks:
            hook.remove()
