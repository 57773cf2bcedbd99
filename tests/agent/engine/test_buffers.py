"""Host memory that a step lets go: who gets it, and when it is freed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.services import meanwhile
from tidegate.agent.engine.buffers import HostBuffers


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_what_is_let_go_serves_the_next_of_its_size_once() -> None:
    buffers = HostBuffers(zeros)
    buffers.allocate_zeros(0, 64)
    address = buffers[0].data_ptr()
    buffers.release(0)
    assert 0 not in buffers
    assert buffers.nbytes == 64, "it is still held"
    buffers.allocate(1, 32)
    assert buffers[1].data_ptr() != address
    buffers.allocate(2, 64)
    assert buffers[2].data_ptr() == address
    buffers.allocate(3, 64)
    assert buffers[3].data_ptr() != address
    assert buffers.nbytes == 32 + 64 + 64


def test_zeros_are_zeros() -> None:
    buffers = HostBuffers(zeros)
    buffers.allocate_zeros(0, 64)
    buffers[0].fill_(7)
    buffers.release(0)
    buffers.allocate_zeros(1, 64)
    assert not buffers[1].any()


def test_what_nobody_took_is_freed() -> None:
    buffers = HostBuffers(zeros)
    for subgroup in range(3):
        buffers.allocate_zeros(subgroup, 64)
        buffers.release(subgroup)
    buffers.release(9)
    buffers.allocate(4, 64)
    assert buffers.nbytes == 3 * 64
    buffers.free_released()
    assert buffers.nbytes == 64
    buffers.clear()
    assert buffers.nbytes == 0


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_thread_may_look_while_another_takes_and_lets_go(hasty_threads: None) -> None:
    """A vote asks what host memory is in use while a step runs."""
    buffers = HostBuffers(zeros)
    for subgroup in range(200):
        buffers.allocate_zeros(subgroup, 64 + subgroup % 3)

    def step(end: threading.Event) -> None:
        while not end.is_set():
            for subgroup in range(200, 300):
                buffers.allocate(subgroup, subgroup)
            for subgroup in range(200, 300):
                buffers.release(subgroup)
            buffers.free_released()

    with meanwhile(step):
        assert all(buffers.nbytes >= 200 * 64 for _ in range(2_000))
    assert buffers.nbytes == sum(64 + subgroup % 3 for subgroup in range(200))


def test_bytes_follow_each_change() -> None:
    buffers = HostBuffers(zeros)
    assert buffers.nbytes == 0
    buffers[0] = zeros(64)
    assert buffers.nbytes == 64
    buffers[0] = zeros(32)
    assert buffers.nbytes == 32
    buffers[1] = zeros(8)
    assert buffers.nbytes == 40
    assert buffers.pop(1).numel() == 8
    assert buffers.nbytes == 32
    assert buffers.pop(1, None) is None
    with pytest.raises(KeyError):
        buffers.pop(1)
    before = buffers._changes
    buffers.release(1)
    buffers.free_released()
    assert buffers.nbytes == 32
    assert buffers._changes == before, "nothing has changed: the sum is still known"
    del buffers[0]
    assert buffers.nbytes == 0
    buffers.allocate(2, 16)
    buffers.release(2)
    buffers.free_released()
    assert buffers.nbytes == 0
