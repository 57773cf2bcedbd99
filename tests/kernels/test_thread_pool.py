"""The threads: as many as asked for, where they may run, gone after close, and harmless in a forked child."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.forked_child import in_child
from tidegate import kernels
from tidegate.kernels import GradDtype, ThreadPool
from tidegate.kernels.arithmetic import oracle

TASKS = Path("/proc/self/task")
ELEMENTS = np.arange(1_000_000, dtype=np.float32)


def workers() -> list[Path]:
    return [task for task in TASKS.iterdir() if (task / "comm").read_text().strip() == "tidegate-cpu"]


def total(pool: ThreadPool) -> float:
    return kernels.sum_of_squares(pool, ELEMENTS.ctypes.data, len(ELEMENTS), GradDtype.F32)[0]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> None:
    assert workers() == []


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_close_ends_the_threads(num_threads: int) -> None:
    pool = ThreadPool(num_threads)
    assert len(workers()) == num_threads - 1
    expected = total(pool)
    pool.close()
    pool.close()
    assert workers() == []
    assert total(pool) == expected, "a closed pool works on the calling thread"
    assert pool._native.num_threads == num_threads


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    pool = ThreadPool(3)
    del pool
    assert workers() == []


def test_started_threads_run_on_the_given_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with ThreadPool(3, cpus=[cpu]):
        assert [os.sched_getaffinity(int(task.name)) for task in workers()] == [{cpu}] * 2
    assert os.sched_getaffinity(0) == before


def test_a_cpu_that_is_not_there_is_named_even_among_others() -> None:
    """The system would silently run the threads on the rest."""
    good = min(os.sched_getaffinity(0))
    missing = max(os.sched_getaffinity(0)) + 512
    with pytest.raises(ValueError, match=f"cpu {missing} may not be used by this process"):
        ThreadPool(3, [good, missing])
    assert workers() == []


def test_a_cpu_given_twice_is_one() -> None:
    cpu = min(os.sched_getaffinity(0))
    with ThreadPool(2, cpus=[cpu, cpu]) as pool:
        assert [os.sched_getaffinity(int(task.name)) for task in workers()] == [{cpu}]
        assert total(pool) == total(pool)


@pytest.mark.parametrize(("num_threads", "cpus"), [(0, None), (-1, None), (2, [-1]), (2, [100_000]), (3, [1023])])
def test_bad_arguments_leave_no_thread(num_threads: int, cpus: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"num_threads|cpu"):
        ThreadPool(num_threads, cpus)
    assert workers() == []


def test_a_forked_child_works_alone() -> None:
    with ThreadPool(3) as pool:
        expected = total(pool)

        def child() -> bool:
            same = total(pool) == expected and workers() == []
            pool.close()
            with ThreadPool(2) as own:
                return same and total(own) == expected

        assert in_child(child)
        assert total(pool) == expected, "the parent's threads are still there"


def test_fork_while_a_job_runs() -> None:
    """A lock that another thread holds at the fork stays locked for ever in the child."""
    stop = threading.Event()
    with ThreadPool(2) as pool:
        expected = total(pool)

        def busy() -> None:
            while not stop.is_set():
                total(pool)

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            assert all(in_child(lambda: total(pool) == expected) for _ in range(20))
        finally:
            stop.set()
            thread.join()


def test_calls_of_several_threads_take_turns() -> None:
    parts = [ELEMENTS[: len(ELEMENTS) - 100_000 * i] for i in range(4)]
    expected = [oracle.sum_of_squares(part, GradDtype.F32)[0] for part in parts]

    def child() -> bool:
        signal.alarm(20)  # calls that share a job may wait for ever
        start, wrong = threading.Barrier(len(parts)), list[float]()
        with ThreadPool(3) as pool:

            def work(part: np.ndarray[Any, Any], right: float) -> None:
                start.wait()
                found = [
                    kernels.sum_of_squares(pool, part.ctypes.data, len(part), GradDtype.F32)[0] for _ in range(100)
                ]
                wrong.extend(one for one in found if one != right)

            threads = [threading.Thread(target=work, args=one) for one in zip(parts, expected, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return not wrong

    assert in_child(child)


def test_the_child_may_drop_the_pool() -> None:
    pools = [ThreadPool(3)]

    def drop() -> bool:
        pools.clear()
        return True

    assert in_child(drop)


def test_copy_and_fill() -> None:
    source, target = (np.arange(1001) % 251).astype(np.uint8), np.zeros(1001, np.uint8)
    kernels.copy(target.ctypes.data + 1, source.ctypes.data, 1000)
    np.testing.assert_array_equal(target[1:], source[:1000])
    kernels.fill(target.ctypes.data, 0xA5, 10)
    assert target[:10].tolist() == [0xA5] * 10
    assert target[10] == source[9]
    kernels.copy(0, 0, 0)
    with pytest.raises(ValueError, match="byte"):
        kernels.fill(target.ctypes.data, 256, 1)
    with pytest.raises(ValueError, match="dst"):
        kernels.copy(0, source.ctypes.data, 1)


def test_instruction_sets_are_what_the_cpu_has() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    have = {"baseline": True, "avx2": "avx2" in flags, "avx512": "avx512vl" in flags}
    assert kernels.instruction_sets() in (["baseline"], [name for name, has in have.items() if has])
    assert kernels.instruction_set() == kernels.instruction_sets()[-1]


def test_the_oracle_says_the_same() -> None:
    with ThreadPool(4) as pool:
        assert total(pool) == oracle.sum_of_squares(ELEMENTS, GradDtype.F32)[0]
