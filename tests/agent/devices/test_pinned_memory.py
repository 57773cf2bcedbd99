"""Host memory for a GPU: zeroed, placed, pinned once, used again; and what happens where it cannot be pinned."""

from __future__ import annotations

import gc
import logging
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tidegate.agent.devices import pinned_memory
from tidegate.agent.devices.pinned_memory import PinnedPool, near_cpus
from tidegate.errors import MemoryBudgetError

PAGE = mmap.PAGESIZE


@dataclass
class Pinner:
    """Notes what is pinned; refuses beyond `limit_bytes`."""

    limit_bytes: int = 1 << 40
    pinned: dict[int, int] = field(default_factory=dict)
    calls: int = 0

    def pin(self, address: int, nbytes: int) -> str:
        self.calls += 1
        if sum(self.pinned.values()) + nbytes > self.limit_bytes:
            return "out of memory"
        self.pinned[address] = nbytes
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def near_cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))


def test_buffers_are_zeroed_and_whole_pages_are_pinned() -> None:
    pinner = Pinner()
    pool = PinnedPool(pinner)
    buffer = pool.take(PAGE + 1)
    assert buffer.numel() == PAGE + 1
    assert buffer.dtype is torch.uint8
    assert not buffer.any()
    assert pinner.pinned == {buffer.data_ptr(): 2 * PAGE}


def test_a_buffer_comes_back_when_its_last_view_goes_and_is_zeroed_for_the_next() -> None:
    pinner = Pinner()
    pool = PinnedPool(pinner)
    first = pool.take(100)
    address, view = first.data_ptr(), first[:8].view(torch.float32)
    del first
    gc.collect()
    other = pool.take(100)
    assert other.data_ptr() != address, "a view was still held"
    view.fill_(1.0)
    del view
    again = pool.take(90)
    assert again.data_ptr() == address
    assert again.numel() == 90
    assert not again.any()
    assert pinner.calls == 2, "pages are pinned once"


def test_large_buffers_are_touched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "TOUCH_BYTES", 3 * PAGE)
    touched: dict[int, int] = {}
    fill = pinned_memory.fill

    def noting(dst: int, byte: int, nbytes: int) -> None:
        touched[dst] = nbytes
        fill(dst, byte, nbytes)

    monkeypatch.setattr(pinned_memory, "fill", noting)
    before = os.sched_getaffinity(0)
    buffer = PinnedPool(Pinner()).take(100 * PAGE)
    assert sum(touched.values()) == 100 * PAGE
    assert sorted(touched)[0] == buffer.data_ptr()
    assert os.sched_getaffinity(0) == before, "the calling thread stays where it is"


def test_what_cannot_be_pinned_is_used_all_the_same_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pinner = Pinner(limit_bytes=2 * PAGE)
    pool = PinnedPool(pinner)
    with caplog.at_level(logging.WARNING):
        held = [pool.take(PAGE) for _ in range(5)]
    assert len(pinner.pinned) == 2
    (warning,) = caplog.records
    assert "could not be pinned (out of memory" in warning.getMessage()
    assert "ulimit -l" in warning.getMessage()
    del held
    pool.close()
    assert not pinner.pinned


def test_no_more_stays_pinned_for_later_than_is_in_use() -> None:
    pinner = Pinner()
    pool = PinnedPool(pinner)
    held = pool.take(4 * PAGE)
    for pages in (10, 20, 40):  # a buffer that grows: each size is another block
        growing = pool.take(pages * PAGE)
        del growing
        gc.collect()
        assert sum(pinner.pinned.values()) <= 2 * (4 + pages) * PAGE
    assert held.data_ptr() in pinner.pinned


def test_close_unpins_what_came_back_and_nothing_that_is_held() -> None:
    pinner = Pinner()
    pool = PinnedPool(pinner)
    held, returned = pool.take(10), pool.take(20)
    del returned
    pool.close()
    assert list(pinner.pinned) == [held.data_ptr()]
    assert pool.mapped_bytes == PAGE


def test_memory_that_the_host_lacks_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10 * PAGE]
    monkeypatch.setattr(pinned_memory, "host_available_bytes", lambda: left[0])
    pinner = Pinner()
    pool = PinnedPool(pinner)
    returned = pool.take(8 * PAGE)
    del returned
    with pytest.raises(MemoryBudgetError, match="do not fit in host memory") as refused:
        pool.take(11 * PAGE)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (11 * PAGE, 10 * PAGE)
    assert not pinner.pinned, "buffers that nobody holds are given up first"


def test_a_fork_gets_empty_pages_and_leaves_the_parents_alone() -> None:
    buffer = PinnedPool(Pinner()).take(PAGE)
    buffer.fill_(7)
    child = os.fork()
    if child == 0:
        os._exit(0 if not buffer.any() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (buffer == 7).all()


def machine(root: Path, nodes: int, node: str) -> Path:
    (root / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (root / "bus/pci/devices/0000:3b:00.0/numa_node").write_text(f"{node}\n")
    for i in range(nodes):
        folder = root / f"devices/system/node/node{i}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * i}-{4 * i + 2},{40 + i}\n")
    return root


def test_the_cpus_next_to_a_gpu(tmp_path: Path) -> None:
    assert near_cpus("0000:3b:00.0", machine(tmp_path / "a", 2, "1")) == {4, 5, 6, 41}
    assert near_cpus("0000:3b:00.0", machine(tmp_path / "b", 1, "0")) == frozenset(), "one node: all CPUs are alike"
    assert near_cpus("0000:3b:00.0", machine(tmp_path / "c", 2, "-1")) == frozenset(), "the firmware does not say"
    assert near_cpus("0000:ff:00.0", machine(tmp_path / "d", 2, "1")) == frozenset()
