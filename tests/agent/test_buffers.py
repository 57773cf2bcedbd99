"""Host memory that a step lets go: who gets it, and when it is freed."""

from __future__ import annotations

import torch

from tidegate.agent.engine.buffers import Buffers


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_what_is_let_go_serves_the_next_of_its_size_once() -> None:
    buffers = Buffers(zeros)
    buffers.make(0, 64)
    address = buffers[0].data_ptr()
    buffers.let_go(0)
    assert 0 not in buffers
    assert buffers.nbytes == 64, "it is still held"
    buffers.take(1, 32)
    assert buffers[1].data_ptr() != address
    buffers.take(2, 64)
    assert buffers[2].data_ptr() == address
    buffers.take(3, 64)
    assert buffers[3].data_ptr() != address
    assert buffers.nbytes == 32 + 64 + 64


def test_zeros_are_zeros() -> None:
    buffers = Buffers(zeros)
    buffers.make(0, 64)
    buffers[0].fill_(7)
    buffers.let_go(0)
    buffers.make(1, 64)
    assert not buffers[1].any()


def test_what_nobody_took_is_freed() -> None:
    buffers = Buffers(zeros)
    for subgroup in range(3):
        buffers.make(subgroup, 64)
        buffers.let_go(subgroup)
    buffers.let_go(9)
    buffers.take(4, 64)
    assert buffers.nbytes == 3 * 64
    buffers.forget()
    assert buffers.nbytes == 64
    buffers.clear()
    assert buffers.nbytes == 0
