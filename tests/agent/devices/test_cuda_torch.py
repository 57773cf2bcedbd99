"""cuda_torch.py over a `torch.cuda` whose threads have a current device and whose devices have contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import tidegate
from bench.host_cost import measure
from tests.agent.devices.fake_torch import FakeDriver, FakeKernels, StickyError, fake_torch
from tests.agent.engine.test_exactness import make_params, random_grads
from tests.agent.plain_adamw import PlainAdamW, array
from tidegate.agent.devices.base import GradRef
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.optimizer import offloaded_optimizer as optimizer_module
from tidegate.kernels import GradDtype
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D

SHAPES = [((40, 3), 0), ((77,), 1), ((130,), 0)]


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_torch() as driver:
        yield driver


@pytest.fixture
def trained(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Trained:
    def second_gpu(*_: object) -> CudaDevice:
        return CudaDevice(TorchCuda(torch.device("cuda", 1), FakeKernels(driver)))

    monkeypatch.setattr(optimizer_module, "choose_device", second_gpu)
    return Trained()


class Trained:
    """An optimizer on the second GPU, and the oracle beside it."""

    def __init__(self) -> None:
        self.params = make_params(SHAPES, 1)
        settings = tidegate.Offload(cpu_threads=1, stride=2.0, subgroup_numel=50, static_ratio=0.3)
        self.optimizer = tidegate.AdamW(self.params, lr=0.03, offload=settings)
        self._plain = PlainAdamW([dict(group) for group in self.optimizer.param_groups], None)

    def train(self, steps: int) -> None:
        for step in range(steps):
            grads = random_grads(self.params, step, some=False)
            for param in self.params:
                param.grad = None
            torch.autograd.backward(self.params, [grad.clone() for grad in grads if grad is not None])
            self.optimizer.step()
            self._plain.step(grads)

    def equals_the_oracle(self) -> bool:
        plain = (one.weight for one in self._plain.params)
        return all((array(p) == weight).all() for p, weight in zip(self.params, plain, strict=True))


def test_training_on_the_second_gpu_makes_no_context_on_the_first(driver: FakeDriver, trained: Trained) -> None:
    """The training thread is one that has not chosen a device, as are lanes and helpers."""
    trained.train(3)
    state = trained.optimizer.state_dict()
    trained.optimizer.load_state_dict(state)
    trained.train(1)
    trained.optimizer.close()
    assert trained.equals_the_oracle()
    assert driver.contexts == {1}
    assert driver.current in (0, 1)
    assert not driver.registered


def test_the_device_of_a_thread_of_others_is_as_it_was(driver: FakeDriver) -> None:
    """Who trains on two GPUs has a context on each."""
    driver.set_device(0)
    runtime = TorchCuda(torch.device("cuda", 1), FakeKernels(driver))
    stream = runtime.new_stream("h2d")
    runtime.host_waits(runtime.record(stream))
    runtime.copy([], True, stream)
    runtime.unpin(pinned(runtime))
    assert driver.current == 0
    assert torch.cuda.current_stream().stream_id == 0


def pinned(runtime: TorchCuda) -> int:
    page = 1 << 12
    runtime.pin(page, page)
    return page


@pytest.mark.parametrize(
    "use",
    [
        lambda runtime, stream, marker: runtime.record(stream),
        lambda runtime, stream, marker: runtime.host_waits(marker),
        lambda runtime, stream, marker: runtime.stream_waits(stream, marker),
        lambda runtime, stream, marker: runtime.copy([], True, stream),
        lambda runtime, stream, marker: runtime.update([], stream),
        lambda runtime, stream, marker: runtime.norms([GradRef(0, 0, GradDtype.F32)], stream)(),
        lambda runtime, stream, marker: runtime.seconds_between(marker, marker),
        lambda runtime, stream, marker: runtime.free(runtime.alloc(10)),
        lambda runtime, stream, marker: runtime.unpin(pinned(runtime)),
    ],
    ids=["record", "host_waits", "stream_waits", "copy", "update", "norms", "seconds_between", "alloc", "pin"],
)
def test_a_new_thread_makes_no_context_on_the_first_gpu(driver: FakeDriver, use: Callable[..., None]) -> None:
    runtime = TorchCuda(torch.device("cuda", 1), FakeKernels(driver))
    stream = runtime.new_stream("h2d")
    marker = runtime.record(stream, timed=True)
    thread = threading.Thread(target=use, args=(runtime, stream, marker))
    thread.start()
    thread.join()
    assert driver.contexts == {1}


# ---- a GPU that fails


def test_pinning_that_is_refused_gives_the_reason_and_blames_no_kernel(driver: FakeDriver) -> None:
    runtime = TorchCuda(torch.device("cuda", 1), FakeKernels(driver))
    stream = runtime.new_stream("device")
    driver.refuse_pin = 801
    assert runtime.pin(1 << 12, 1 << 12) == "cudaHostRegister: error 801"
    runtime.update([], stream)


def test_where_pinning_is_refused_training_goes_on_with_pageable_memory(
    driver: FakeDriver, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refuse_pin = 801
    trained: Trained = request.getfixturevalue("trained")
    trained.train(3)
    trained.optimizer.close()
    assert trained.equals_the_oracle()
    assert not driver.registered
    assert "error 801" in caplog.text


def test_all_of_a_device_is_closed_when_the_gpu_has_failed(driver: FakeDriver) -> None:
    device = CudaDevice(TorchCuda(torch.device("cuda", 1), FakeKernels(driver)))
    buffers = [device.host_buffer(100) for _ in range(3)]
    buffers.clear()
    driver.broken = "an illegal memory access"
    with pytest.raises(StickyError, match=r"an illegal memory access \(1\)"):
        device.close()
    assert not driver.registered, "unpinning is tried for each"


def test_all_of_an_optimizer_is_closed_when_the_gpu_has_failed(driver: FakeDriver, trained: Trained) -> None:
    trained.train(2)

    def fail() -> None:
        with trained.optimizer:
            driver.broken = "an illegal memory access"
            trained.train(1)

    with pytest.raises(StickyError, match=r"an illegal memory access \(1\)"):
        fail()
    assert not any(lane.is_alive() for lane in trained.optimizer.engine._executor._threads)
    assert not driver.registered
    driver.broken = ""
    tidegate.AdamW(trained.params).close()  # they are free for another


def test_a_backward_that_waits_for_its_step_when_the_gpu_fails(driver: FakeDriver, trained: Trained) -> None:
    """What was enqueued is waited for first: it is the first to fail."""
    trained.train(1)
    torch.autograd.backward(trained.params, [torch.ones_like(param) for param in trained.params])
    driver.broken = "an illegal memory access"
    with pytest.raises(StickyError):
        trained.optimizer.close()
    assert not any(lane.is_alive() for lane in trained.optimizer.engine._executor._threads)
    assert not driver.registered


# ---- events


def test_events_are_used_again(driver: FakeDriver, trained: Trained) -> None:
    trained.train(3)
    made = driver.events_made
    trained.train(3)
    trained.optimizer.close()
    assert driver.events_made <= made + 5, "a few more were on the way at once"


def test_where_no_time_is_read_events_have_none(driver: FakeDriver) -> None:
    runtime = TorchCuda(torch.device("cuda", 1), FakeKernels(driver))
    stream = runtime.new_stream("h2d")
    timed, plain = runtime.record(stream, timed=True), runtime.record(stream)
    with pytest.raises(AssertionError, match="without timing"):
        runtime.seconds_between(timed, plain)


def test_the_bench_of_what_ops_cost_the_host() -> None:
    found = measure(steps=2)
    assert found["runtime"] == "fake"
    assert set(found["microseconds_per_op"]) == {CPU, D2H, DEVICE, H2D}
