"""The CUDA device itself, over the fake runtime: memory, times, and when it is chosen."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda
from tests.agent.devices.vector_clocks import RaceError
from tidegate.agent.devices import cuda, selection
from tidegate.agent.devices.base import Copy, GradRef
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.devices.selection import choose_device
from tidegate.errors import MemoryBudgetError, ParameterError
from tidegate.kernels import GradDtype, implementation
from tidegate.plan.ops import D2H, DEVICE, H2D

# ---- memory

ADAMW = implementation("adamw")


def test_what_does_not_fit_is_refused_with_figures() -> None:
    device = CudaDevice(FakeCuda(memory_bytes=1000), limit_bytes=600)
    assert device.capacity_bytes == 600
    device.alloc(500)
    with pytest.raises(MemoryBudgetError, match=r"101 bytes .* 100 of 600") as refused:
        device.alloc(101)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (101, 100)


def test_memory_that_the_framework_cannot_give_is_refused_likewise() -> None:
    class Scattered(FakeCuda):
        def alloc(self, nbytes: int) -> int:
            raise MemoryError("out of memory")

    device = CudaDevice(Scattered(memory_bytes=1000))
    with pytest.raises(MemoryBudgetError, match="too fragmented"):
        device.alloc(10)


def test_a_limit_beyond_the_gpu_is_the_gpus() -> None:
    assert CudaDevice(FakeCuda(memory_bytes=1000), limit_bytes=5000).capacity_bytes == 1000


def test_the_peak_is_since_it_was_last_taken() -> None:
    device = CudaDevice(FakeCuda())
    device.free(device.alloc(300))
    device.alloc(100)
    assert device.take_peak_bytes() == 300
    assert device.take_peak_bytes() == 100 == device.in_use_bytes


def test_state_goes_there_and_back() -> None:
    device = CudaDevice(FakeCuda(eagerness=0.0))
    there, back = device.host_buffer(100), device.host_buffer(100)
    there.copy_(torch.arange(100))
    address = device.alloc(100)
    device.wait(H2D, device.now())
    arrived = device.copy(H2D, [Copy(address, there.data_ptr(), 100)])
    device.wait(D2H, arrived)
    returned = device.copy(D2H, [Copy(back.data_ptr(), address, 100)])
    assert not back.any(), "nothing is done before somebody waits"
    returned.wait()
    assert torch.equal(back, there)


def test_norms_are_known_after_the_wait() -> None:
    device = CudaDevice(FakeCuda(eagerness=0.0))
    grad = torch.tensor([3.0, 4.0, float("inf")])
    device.wait(DEVICE, device.now())
    event, found = device.norms([GradRef(grad.data_ptr(), 3, GradDtype.F32)])
    assert found == []
    event.wait()
    event.wait()
    assert found == [(25.0, 1)]
    assert device.norms([])[1] == []


# ---- times


def test_spans_are_on_the_hosts_clock() -> None:
    device = CudaDevice(FakeCuda(eagerness=1.0))
    before = time.monotonic()
    event = device.copy(H2D, [])
    event.wait()
    start, end = event.span()
    assert before - 0.001 <= start <= end <= time.monotonic() + 0.001


def test_the_clocks_are_compared_again_when_they_may_have_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(FakeCuda(eagerness=1.0))
    first = device._clock.anchor
    event = device.copy(H2D, [])
    event.wait()
    event.span()
    assert device._clock.anchor is first
    monkeypatch.setattr(cuda, "ANCHOR_SECONDS", 0.0)
    event.span()
    assert device._clock.anchor is not first
    event.span()  # by the comparison that was made before it, not by the newest


def test_after_a_long_pause_the_clocks_are_compared_before_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that comes ten minutes after the last one."""
    fake = FakeCuda(eagerness=1.0)
    device = CudaDevice(fake)
    fake.clock = lambda: time.monotonic() + 5.0
    monkeypatch.setattr(cuda, "ANCHOR_SECONDS", 0.0)
    before = time.monotonic()
    event = device.copy(H2D, [])
    event.wait()
    start, end = event.span()
    assert before - 0.1 <= start <= end <= time.monotonic() + 0.1


def test_a_comparison_that_the_gpu_was_too_busy_for_replaces_no_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(FakeCuda(eagerness=1.0))
    clock, first = device._clock, device._clock.anchor
    monkeypatch.setattr(cuda, "ANCHOR_SECONDS", 0.0)
    monkeypatch.setattr(clock, "_compare", lambda: replace(first, seconds=first.seconds + 1, error_seconds=0.5))
    device.copy(H2D, [])
    assert clock.anchor is first


def test_a_time_that_nobody_has_waited_for_cannot_be_read() -> None:
    device = CudaDevice(FakeCuda(eagerness=1.0))
    with pytest.raises(RaceError):
        device.copy(H2D, []).span()


# ---- when it is chosen


@dataclass
class On:
    """What of a parameter tells where it is."""

    device: torch.device


def on(*names: str) -> list[Any]:
    return [On(torch.device(name)) for name in names]


def test_the_emulated_device_serves_weights_on_the_cpu() -> None:
    assert isinstance(choose_device(tidegate.Offload(), [torch.zeros(3)], ADAMW), EmulatedDevice)


def test_the_emulated_device_holds_the_state_of_all_subgroups_however_small() -> None:
    params = [torch.zeros(5500)]
    device = choose_device(tidegate.Offload(subgroup_numel=1), params, ADAMW)
    device.adopt(params[0])
    assert len({device.alloc(12) for _ in range(5500)}) == 5500


def test_the_gpu_that_the_parameters_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []

    def runtime(device: torch.device, **_: object) -> FakeCuda:
        chosen.append(device)
        return FakeCuda(memory_bytes=1000)

    monkeypatch.setattr(selection, "TorchCuda", runtime)
    device = choose_device(tidegate.Offload(device_memory_bytes=400), on("cuda:1", "cuda:1"), ADAMW)
    assert chosen == [torch.device("cuda:1")]
    assert (device.kind, device.capacity_bytes) == ("cuda", 400)


@pytest.mark.parametrize(
    ("params", "settings", "says"),
    [
        (on("cpu", "cuda:0"), {}, "are on cpu, cuda:0: one optimizer works on one device"),
        (on("cuda:0", "cuda:1"), {}, "are on cuda:0, cuda:1: one optimizer works on one device"),
        (on("mps"), {}, "are on mps: weights on a CUDA device, or on the CPU"),
        (on("cuda:0"), {"device": "emulated"}, "device='emulated' is for weights on the CPU"),
    ],
)
def test_what_no_one_device_serves(params: list[Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        choose_device(tidegate.Offload(**settings), params, ADAMW)


@pytest.mark.parametrize(("queues", "warns"), [("1", True), ("3", True), ("8", False), ("", False), ("many", False)])
def test_few_queues_of_the_gpu_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queues: str, warns: bool
) -> None:
    monkeypatch.setattr(selection, "TorchCuda", lambda *_, **__: FakeCuda())
    monkeypatch.setattr(selection, "_warned", set())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            choose_device(tidegate.Offload(), on("cuda:0"), ADAMW)
    said = [one.message for one in caplog.records if "CUDA_DEVICE_MAX_CONNECTIONS" in one.message]
    assert len(said) == warns
    assert all(f"={queues}" in one and "set it to 8 or more" in one for one in said)


def test_the_emulated_device_needs_no_queues(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with caplog.at_level(logging.WARNING):
        choose_device(tidegate.Offload(), [torch.zeros(3)], ADAMW)
    assert not caplog.records
