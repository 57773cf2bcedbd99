"""Updates that make the checksums of the write that follows them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples
from tidegate.kernels import (
    GradDtype,
    IoPool,
    ThreadPool,
    WeightFormat,
    aligned_buffer,
    crc32c,
    num_blocks,
    open_direct,
)
from tidegate.kernels.adamw import native
from tidegate.kernels.adamw.scalars import scalars
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.dispatch import Gate, GradientFactor, Lanes, Outcome, Program, Task, TaskList, TransferTask, Until
from tidegate.kernels.io.direct_io import WriteStop

PAGE = 4096
SOURCES = Path(__file__).parents[3] / "kernels" / "src"
NAMES = (
    "adamw", "block_checksums", "checksum", "computing_cores", "copy", "direct_io", "lock_file", "move_block",
    "path_lock", "sum_of_squares", "tasks", "thread_pool",
)  # fmt: skip
Part = tuple[int, int]
"""First element and number of elements."""


class State:
    """A state of two moments in memory, and its file."""

    def __init__(self, folder: Path, numel: int, block_bytes: int) -> None:
        self.numel, self.block_bytes = numel, block_bytes
        self.nbytes = -(-8 * numel // PAGE) * PAGE
        self.memory = aligned_buffer(self.nbytes)
        self.memory[:] = np.random.default_rng(numel).integers(0, 100, self.nbytes)  # small numbers as fp32
        self.weight = np.ones(numel, np.float32)
        self.grad = np.random.default_rng(0).normal(size=numel).astype(np.float32)
        self.checksums = np.zeros(num_blocks(self.nbytes, block_bytes), np.uint32)
        self.fd, _ = open_direct(folder / "state", write=True, create=True)

    def write(self, io: IoPool) -> TransferTask:
        padding = self.nbytes - 8 * self.numel
        return io.task(
            True, self.fd, self.memory.ctypes.data, self.nbytes, 0, self.block_bytes, self.checksums, padding, None,
            0.0, WriteStop(),
        )  # fmt: skip

    def update(self, pool: ThreadPool, parts: list[Part], flush: TransferTask | None) -> Task:
        address = self.memory.ctypes.data
        runs = [
            Update(
                numel=count, weight=self.weight.ctypes.data + 4 * first, weight_format=WeightFormat.F32, aux=0,
                tensors=(address + 4 * first, address + 4 * (self.numel + first)),
                grad=self.grad.ctypes.data + 4 * first, grad_dtype=GradDtype.F32,
                scalars=scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=1),
            )
            for first, count in parts
        ]  # fmt: skip
        return native.task(pool, runs, GradientFactor(), flush)

    def expected(self) -> list[int]:
        at = self.memory.ctypes.data
        ends = [*range(0, self.nbytes, self.block_bytes), self.nbytes]
        return [crc32c(at + low, high - low) for low, high in pairwise(ends)]

    def stored(self) -> NDArray[np.uint8]:
        os.lseek(self.fd, 0, os.SEEK_SET)
        buffer = aligned_buffer(self.nbytes)
        assert os.preadv(self.fd, [buffer.data], 0) == self.nbytes
        return buffer


@contextmanager
def pools() -> Iterator[tuple[ThreadPool, IoPool]]:
    pool = ThreadPool(3)
    with IoPool(4) as io:
        yield pool, io
    pool.close()


def run_in_turn(first: Task, second: Task, between: Callable[[], None] = lambda: None) -> None:
    """Runs two tasks on lanes, one after the other, and `between` in Python."""
    lanes = Lanes([False, False, False])
    threads = [threading.Thread(target=lanes.take, args=(lane,)) for lane in (0, 2)]
    for thread in threads:
        thread.start()
    ops = [(lane, Gate.NONE, 0, False, False, [lane - 1] if lane else []) for lane in range(3)]
    lanes.start(Program(ops), TaskList([(0, first), (2, second)]))
    begun = lanes.take(1)
    assert begun is not None
    between()
    lanes.ended(begun[1], Outcome.ISSUED, True)
    assert lanes.wait(Until.DONE, [], 30.0)
    lanes.close()
    for thread in threads:
        thread.join()
    lanes.forget()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), numel=st.integers(1, 200_000), block_pages=st.integers(1, 40))
def test_checksums_are_those_of_the_memory(tmp_path: Path, data: st.DataObject, numel: int, block_pages: int) -> None:
    """Whatever parts of the state are updated, and wherever they and the blocks begin and end."""
    cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=8)) | {0, numel})
    parts = [(low, high - low) for low, high in pairwise(cuts)]
    parts = [part for part in parts if data.draw(st.booleans())]
    state = State(tmp_path, numel, block_pages * PAGE)
    with pools() as (pool, io):
        flush = state.write(io)
        run_in_turn(state.update(pool, parts, flush), flush)
        assert flush.succeeded
        assert state.checksums.tolist() == state.expected()
        assert not state.memory[8 * numel :].any()
        assert np.array_equal(state.stored(), state.memory)
    os.close(state.fd)


def test_the_write_takes_the_checksums_of_the_update_and_only_once(tmp_path: Path) -> None:
    state = State(tmp_path, 50_000, 16 * PAGE)

    def change() -> None:
        state.memory[5 * PAGE] ^= 1

    with pools() as (pool, io):
        flush = state.write(io)
        run_in_turn(state.update(pool, [(0, 50_000)], flush), flush, change)
        of_update = state.checksums.copy()
        assert of_update.tolist() != state.expected(), "the write has made its own"
        change()
        assert of_update.tolist() == state.expected()
        flush.reset()
        change()
        run_in_turn(state.update(pool, [], None), flush)
        assert state.checksums.tolist() == state.expected()
    os.close(state.fd)


@pytest.mark.parametrize("paired", [False, True])
def test_the_update_is_the_same(tmp_path: Path, paired: bool) -> None:
    one, other = State(tmp_path, 70_001, PAGE), State(tmp_path, 70_001, PAGE)
    with pools() as (pool, io):
        run_in_turn(one.update(pool, [(0, 70_001)], None), one.write(io))
        flush = other.write(io)
        run_in_turn(other.update(pool, [(0, 33), (33, 69_968)], flush if paired else None), flush)
        assert np.array_equal(one.memory, other.memory)
        assert np.array_equal(one.weight, other.weight)
    os.close(one.fd)
    os.close(other.fd)


@pytest.mark.torture
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    sources = [Path(__file__).with_name("checksums_driver.cpp"), *(SOURCES / f"{name}.cpp" for name in NAMES)]
    command = ["c++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run([*command, f"-I{SOURCES}", *map(str, sources), "-pthread", "-o", str(program)], check=True)
    run = [str(program), "300", str(tmp_path / "state")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "updates 300\n"
