"""The emulated device behaves as a device would: memory apart, poisoned, bounded; lanes paced."""

from __future__ import annotations

import random
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from tidegate.agent.devices import adopted_tensors
from tidegate.agent.devices.adopted_tensors import AdoptedTensors
from tidegate.agent.devices.base import Copy
from tidegate.agent.devices.emulated import Arena, EmulatedDevice, EmulatedRates
from tidegate.errors import DeviceAccessError, MemoryBudgetError


def floats(device: EmulatedDevice, address: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    host = device.host_buffer(4 * count)
    device.copy("d2h", [Copy(host.data_ptr(), address, 4 * count)])
    return host.view(torch.float32).numpy().copy()


def test_unfilled_and_freed_memory_is_nan() -> None:
    device = EmulatedDevice(1 << 20)
    address = device.alloc(400)
    assert np.isnan(floats(device, address, 100)).all()
    ones = torch.ones(100)
    device.copy("h2d", [Copy(address, ones.data_ptr(), 400)])
    assert (floats(device, address, 100) == 1).all()
    device.free(address)
    again = device.alloc(400)
    assert again == address
    assert np.isnan(floats(device, again, 100)).all()


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_a_host_pointer_where_the_device_is_meant_raises(lane: str) -> None:
    device = EmulatedDevice(1 << 20)
    a, b = torch.ones(10), torch.ones(10)
    with pytest.raises(DeviceAccessError, match="not \\(or no longer\\) on the device"):
        device.copy(lane, [Copy(a.data_ptr(), b.data_ptr(), 40)])


def test_a_device_pointer_where_the_host_is_meant_raises() -> None:
    device = EmulatedDevice(1 << 20)
    a, b = device.alloc(64), device.alloc(64)
    with pytest.raises(DeviceAccessError, match="host address is needed"):
        device.copy("h2d", [Copy(a, b, 64)])


def test_use_after_free_and_overrun_and_double_free_raise() -> None:
    device = EmulatedDevice(1 << 20)
    host = device.host_buffer(1024)
    address = device.alloc(256)
    with pytest.raises(DeviceAccessError):
        device.copy("h2d", [Copy(address, host.data_ptr(), 257)])
    device.free(address)
    with pytest.raises(DeviceAccessError):
        device.copy("h2d", [Copy(address, host.data_ptr(), 256)])
    with pytest.raises(DeviceAccessError, match="freed already"):
        device.free(address)


def test_adopted_tensors_are_device_memory_for_as_long_as_they_live() -> None:
    device = EmulatedDevice(1 << 20)
    weight, host = torch.zeros(8), torch.ones(8)
    device.adopt(weight)
    assert device.in_use_bytes == 32
    device.copy("h2d", [Copy(weight.data_ptr(), host.data_ptr(), 32)])
    assert (weight == 1).all()
    other = device.alloc(32)
    with pytest.raises(DeviceAccessError, match="host address is needed"):
        device.copy("h2d", [Copy(other, weight.data_ptr(), 32)])
    address = weight.data_ptr()
    del weight
    assert device.in_use_bytes == 256
    with pytest.raises(DeviceAccessError):
        device.copy("h2d", [Copy(address, host.data_ptr(), 32)])


def test_whose_bytes_they_are_is_told_exactly_and_without_asking_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted, memory = AdoptedTensors(), torch.zeros(1 << 15, dtype=torch.uint8)
    draw, living = random.Random(3), dict[int, int]()
    for _ in range(3000):
        first, nbytes = draw.randrange(0, 30_000), draw.choice([1, 3, 8, 8, 8, 64, 2000])
        adopted.add(memory[first : first + nbytes])
        living[memory.data_ptr() + first] = nbytes
        if draw.random() < 0.2:
            address, size = memory.data_ptr() + draw.randrange(-100, 32_900), draw.randrange(0, 100)
            end = address + size
            assert adopted.holds(address, size) == any(at <= address and end <= at + n for at, n in living.items())
            assert adopted.overlaps(address, size) == any(at < end and address < at + n for at, n in living.items())
    apart, many = AdoptedTensors(), [torch.zeros(8) for _ in range(1000)]
    for one in many:
        apart.add(one)
    asked: list[int] = []
    monkeypatch.setattr(adopted_tensors, "_expired", lambda cdata: bool(asked.append(cdata)))
    for one in many:
        assert apart.holds(one.data_ptr(), 32)
        assert not apart.overlaps(memory.data_ptr(), 1 << 15)
    assert len(asked) < 20 * len(many)


def test_capacity_bounds_arena_and_adopted_tensors_together_and_says_figures() -> None:
    device = EmulatedDevice(4096)
    weight = torch.zeros(512)
    device.adopt(weight)
    with pytest.raises(MemoryBudgetError, match="3,000 bytes do not fit in device memory: 2,048 of 4,096") as refused:
        device.alloc(3000)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (3000, 2048)
    device.alloc(2048)


def test_peak_is_of_the_time_since_it_was_last_taken() -> None:
    device = EmulatedDevice(1 << 20)
    big = device.alloc(4096)
    device.free(big)
    assert device.take_peak_bytes() == 4096
    assert device.take_peak_bytes() == 0


def test_a_copy_takes_at_least_its_stated_time() -> None:
    device = EmulatedDevice(1 << 20, EmulatedRates(h2d_bytes_per_second=1e6))
    address, host = device.alloc(50_000), device.host_buffer(50_000)
    began = time.monotonic()
    start, end = device.copy("h2d", [Copy(address, host.data_ptr(), 50_000)]).span()
    assert time.monotonic() - began >= 0.05
    assert end - start >= 0.05


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=40))
def test_arena_blocks_never_overlap_and_freed_space_comes_back(moves: list[tuple[bool, int]]) -> None:
    arena, held = Arena(20_000), []
    for free, size in moves:
        if free and held:
            arena.free(held.pop(size % len(held)))
        elif (address := arena.alloc(size)) is not None:
            held.append(address)
        ends = [start + taken for start, taken in arena.blocks]
        assert all(end <= start for end, (start, _) in zip(ends, arena.blocks[1:], strict=False))
        assert all(end <= arena.capacity_bytes for end in ends)
    for address in held:
        arena.free(address)
    assert arena.in_use_bytes == 0
    assert arena.alloc(19_900) is not None
