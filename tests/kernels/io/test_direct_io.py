"""Direct I/O on real files: what is written is read, around the page cache or not, and every failure is told.

`/dev/urandom` is the slow device: a read of `SLOW_BYTES` takes a tenth of a second or more, as one block.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples
from tests.kernels.forked_child import in_child
from tidegate import kernels
from tidegate.kernels import ALIGNMENT, IoPool, IoTicket, aligned_buffer, num_blocks, open_direct

TASKS = Path("/proc/self/task")
SLOW_BYTES = 64 << 20
MiB = 1 << 20


_of_others: set[str] = set()


def io_threads() -> list[Path]:
    def name(task: Path) -> str:
        try:
            return (task / "comm").read_text().strip()
        except OSError:  # a thread of another test has just ended
            return ""

    return [task for task in TASKS.iterdir() if name(task) == "tidegate-io" and task.name not in _of_others]


def random_buffer(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    return buffer


def checksums(buffer: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint32]:
    blocks = [buffer[i : i + block_bytes] for i in range(0, len(buffer), block_bytes)]
    return np.array([kernels.crc32c(block.ctypes.data, len(block)) for block in blocks], np.uint32)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    # An optimizer of another test whose disk hung keeps its threads.
    _of_others.clear()
    _of_others.update(task.name for task in io_threads())
    yield
    gc.collect()
    end = time.monotonic() + 5
    while io_threads() and time.monotonic() < end:
        time.sleep(0.001)  # the system lists a thread for a moment after it was joined
    assert io_threads() == []


@pytest.fixture
def fds() -> Iterator[list[int]]:
    """Closed after the test."""
    opened: list[int] = []
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.fixture
def file(tmp_path: Path, fds: list[int]) -> int:
    """A new direct file on the disk; buffered where the disk's file system knows no better."""
    fd, _ = open_direct(tmp_path / "file", write=True, create=True)
    fds.append(fd)
    return fd


@pytest.fixture
def slow(fds: list[int]) -> Callable[[IoPool], IoTicket]:
    """Occupies a thread of a pool."""
    fd = os.open("/dev/urandom", os.O_RDONLY)
    fds.append(fd)
    memory = aligned_buffer(SLOW_BYTES)

    def begin(pool: IoPool) -> IoTicket:
        return pool.read(fd, memory.ctypes.data, SLOW_BYTES, 0, SLOW_BYTES)

    return begin


# What is written is read


@pytest.fixture(scope="module", params=["disk", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path_factory.mktemp("disk")
        return
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    own = shm / f"tidegate-test-{os.getpid()}"
    own.mkdir()
    yield own
    for path in own.iterdir():
        path.unlink()
    own.rmdir()


pages = st.integers(1, 40).map(lambda count: count * ALIGNMENT)


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(pages, min_size=1, max_size=5),
    block_bytes=pages,
    threads=st.integers(1, 6),
    gap=st.integers(0, 3),
    with_checksums=st.booleans(),
)
def test_direct_round_trips(
    folder: Path, sizes: list[int], block_bytes: int, threads: int, gap: int, with_checksums: bool
) -> None:
    fd, _ = open_direct(folder / "direct", write=True, create=True)
    round_trip(fd, sizes, block_bytes, threads, gap * ALIGNMENT, with_checksums)


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=5),
    block_bytes=st.integers(1000, 120_000),
    threads=st.integers(1, 6),
    gap=st.integers(0, 5000),
    with_checksums=st.booleans(),
)
def test_buffered_round_trips_need_no_alignment(
    folder: Path, sizes: list[int], block_bytes: int, threads: int, gap: int, with_checksums: bool
) -> None:
    fd, direct = open_direct(folder / "buffered", write=True, create=True, direct=False)
    assert not direct
    round_trip(fd, sizes, block_bytes, threads, gap, with_checksums)


def round_trip(fd: int, sizes: list[int], block_bytes: int, threads: int, gap: int, with_checksums: bool) -> None:
    """One transfer for each size, all in flight at once, `gap` bytes apart in the file; closes `fd`."""
    whole = random_buffer(max(sum(sizes), 1), seed=sum(sizes))
    ends = np.cumsum(sizes).tolist()
    parts = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    offsets = [end - size + gap * (i + 1) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    found = [np.zeros(num_blocks(size, block_bytes) if with_checksums else 0, np.uint32) for size in sizes]
    back = aligned_buffer(len(whole))
    os.ftruncate(fd, 0)
    with IoPool(threads) as pool:
        for move, memory in ((pool.write, whole), (pool.read, back)):
            starts = [memory.ctypes.data + end - size for size, end in zip(sizes, ends, strict=True)]
            tickets = [
                move(fd, start, size, offset, block_bytes, crcs)
                for start, size, offset, crcs in zip(starts, sizes, offsets, found, strict=True)
            ]
            assert all(ticket.wait(30) and ticket.ok for ticket in tickets)
            assert [ticket.nbytes for ticket in tickets] == sizes
            for part, crcs in zip(parts, found, strict=True):
                np.testing.assert_array_equal(crcs, checksums(part, block_bytes)[: len(crcs)])
    on_disk = Path(f"/proc/self/fd/{fd}").read_bytes()
    os.close(fd)
    assert [on_disk[o : o + size] for o, size in zip(offsets, sizes, strict=True)] == [p.tobytes() for p in parts]
    np.testing.assert_array_equal(back[: sum(sizes)], whole[: sum(sizes)])


def test_short_reads_are_continued(fds: list[int]) -> None:
    """The kernel hands out its symbols a page or less at a time."""
    symbols = Path("/proc/kallsyms").read_bytes()[:300_000]
    fds.append(os.open("/proc/kallsyms", os.O_RDONLY))
    assert len(os.pread(fds[0], len(symbols), 0)) < len(symbols), "this read is not short"
    memory = aligned_buffer(len(symbols))
    with IoPool(2) as pool:
        ticket = pool.read(fds[0], memory.ctypes.data, len(symbols), 0, 200_000, checksums_of(symbols, 200_000))
        assert ticket.wait(30)
    assert (ticket.ok, ticket.nbytes) == (True, len(symbols))
    assert memory.tobytes() == symbols


def checksums_of(data: bytes, block_bytes: int) -> NDArray[np.uint32]:
    return checksums(np.frombuffer(data, np.uint8), block_bytes)


# Failures


@pytest.mark.parametrize("threads", [1, 4])
def test_a_flipped_bit_is_found(file: int, threads: int) -> None:
    block_bytes, blocks, bad = 8 * ALIGNMENT, 16, 5
    data, crcs = random_buffer(blocks * block_bytes), np.zeros(blocks, np.uint32)
    back = aligned_buffer(len(data))
    with IoPool(threads) as pool:
        assert pool.write(file, data.ctypes.data, len(data), 0, block_bytes, crcs).wait(30)
        place = bad * block_bytes + 12_345
        with open(f"/proc/self/fd/{file}", "r+b") as plain:
            plain.seek(place)
            plain.write(bytes([data[place] ^ 1]))
        ticket = pool.read(file, back.ctypes.data, len(data), 0, block_bytes, crcs)
        other = pool.read(file, back.ctypes.data, bad * block_bytes, 0, block_bytes, crcs[:bad])
        assert ticket.wait(30)
        assert other.wait(30)
    assert (ticket.ok, ticket.checksum_mismatch, ticket.failed_block, ticket.error) == (False, True, bad, 0)
    assert not ticket.end_of_file
    assert ticket.nbytes >= (bad + 1) * block_bytes
    assert other.ok, "a failure is that of one transfer"
    if threads == 1:
        assert ticket.nbytes == (bad + 1) * block_bytes
        assert not back[(bad + 1) * block_bytes :].any(), "blocks after the failure were read"


def test_the_first_of_the_failed_blocks_is_named(file: int) -> None:
    """Blocks fail in any order, but the first one is always begun before another fails."""
    data = random_buffer(64 * ALIGNMENT)
    wrong = ~checksums(data, ALIGNMENT)
    with IoPool(6) as pool:
        assert pool.write(file, data.ctypes.data, len(data), 0, ALIGNMENT).wait(30)
        for _ in range(50):
            ticket = pool.read(file, data.ctypes.data, len(data), 0, ALIGNMENT, wrong)
            assert ticket.wait(30)
            assert (ticket.checksum_mismatch, ticket.failed_block) == (True, 0)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("file_bytes", "failed", "moved"), [(0, 0, 0), (5000, 0, 5000), (8192, 1, 8192), (9000, 1, 9000)]
)
def test_the_end_of_the_file_is_an_error(
    tmp_path: Path, fds: list[int], direct: bool, file_bytes: int, failed: int, moved: int
) -> None:
    (tmp_path / "short").write_bytes(b"x" * file_bytes)
    fds.append(open_direct(tmp_path / "short", direct=direct)[0])
    memory = aligned_buffer(8 * ALIGNMENT)
    with IoPool(1) as pool:
        ticket = pool.read(fds[0], memory.ctypes.data, len(memory), 0, 2 * ALIGNMENT)
        assert ticket.wait(30), "it tries for ever"
    assert (ticket.ok, ticket.end_of_file, ticket.failed_block, ticket.error) == (False, True, failed, 0)
    assert ticket.nbytes == moved
    assert memory.tobytes() == (b"x" * file_bytes).ljust(len(memory), b"\0")


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_bad_descriptor(file: int, kind: str) -> None:
    memory = aligned_buffer(ALIGNMENT)
    with IoPool(2) as pool:
        for fd in (-1, 1_000_000):
            bad = getattr(pool, kind)(fd, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
            good = pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
            assert bad.wait(30)
            assert good.wait(30)
            assert (bad.ok, bad.error, bad.failed_block, bad.nbytes) == (False, errno.EBADF, 0, 0)
            assert good.ok


@pytest.mark.parametrize("threads", [1, 3])
def test_a_full_file_system(tmp_path: Path, threads: int) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MiB}", "tmpfs", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        fd, _ = open_direct(mounted / "file", write=True, create=True)
        memory = random_buffer(4 * MiB)
        with IoPool(threads) as pool:
            ticket = pool.write(fd, memory.ctypes.data, len(memory), 0, 16 * ALIGNMENT)
            assert ticket.wait(30)
        os.close(fd)
        assert (ticket.ok, ticket.error) == (False, errno.ENOSPC)
        assert 0 <= ticket.failed_block <= MiB // (16 * ALIGNMENT) + threads
        assert ticket.nbytes <= MiB
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_write_that_is_cut_short_goes_on_and_tells_why(tmp_path: Path, fds: list[int]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fds.append(open_direct(tmp_path / "file", write=True, create=True, direct=False)[0])
    memory = random_buffer(16_384)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with IoPool(1) as pool:
            ticket = pool.write(fds[0], memory.ctypes.data, len(memory), 0, len(memory))
            assert ticket.wait(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ticket.error, ticket.failed_block, ticket.nbytes) == (errno.EFBIG, 0, 10_000)
    assert (tmp_path / "file").read_bytes() == memory[:10_000].tobytes()


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 512}, r"address is \d+, must be a multiple of 4096 for a file opened with O_DIRECT"),
        ({"nbytes": 5000}, r"nbytes is 5000, must be a multiple of 4096"),
        ({"offset": 512}, r"offset is 512, must be a multiple of 4096"),
        ({"block_bytes": 6000}, r"block_bytes is 6000, must be a multiple of 4096"),
        ({"block_bytes": 0}, r"block_bytes is 0"),
        ({"block_bytes": -1}, r"block_bytes is -1"),
        ({"nbytes": -4096}, r"nbytes is -4096"),
        ({"offset": -4096}, r"offset is -4096"),
        ({"offset": 2**63 - 4096}, r"must lie in 0\.\.9223372036854775807"),
        ({"checksums": np.zeros(3, np.uint32)}, r"of shape \(3,\), must be contiguous uint32 of shape \(2,\)"),
        ({"checksums": np.zeros(2, np.int64)}, r"is int64 of shape \(2,\), must be contiguous uint32"),
        ({"checksums": np.zeros(4, np.uint32)[::2]}, r"must be contiguous uint32"),
    ],
)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_cannot_work_is_refused(
    tmp_path: Path, fds: list[int], kind: str, change: dict[str, object], message: str
) -> None:
    fd, direct = open_direct(tmp_path / "file", write=True, create=True)
    fds.append(fd)
    if not direct:
        pytest.skip("the file system knows no O_DIRECT")
    memory = aligned_buffer(3 * ALIGNMENT)
    given = {"address": 0, "nbytes": 2 * ALIGNMENT, "offset": 0, "block_bytes": ALIGNMENT, "checksums": None} | change
    given["address"] += memory.ctypes.data
    with IoPool(1) as pool, pytest.raises(ValueError, match=message):
        getattr(pool, kind)(fd, *given.values())


def test_checksums_go_to_memory_that_may_be_written(file: int) -> None:
    memory, crcs = aligned_buffer(ALIGNMENT), np.zeros(1, np.uint32)
    crcs.flags.writeable = False
    with IoPool(1) as pool, pytest.raises(ValueError, match="found is read-only"):
        pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT, crcs)


def test_no_address(file: int) -> None:
    with IoPool(1) as pool:
        with pytest.raises(ValueError, match="address is 0"):
            pool.read(file, 0, ALIGNMENT, 0, ALIGNMENT)
        nothing = pool.read(file, 0, 0, 0, ALIGNMENT)
        assert nothing.done
        assert nothing.ok
        assert nothing.start == nothing.end <= time.monotonic()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pool_has_threads(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}, must be 1 or more"):
        IoPool(threads)


# Queue and tickets


def test_transfers_are_taken_in_order(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    begin = time.monotonic()
    with IoPool(1) as pool:
        first = slow(pool)
        others = [pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT) for _ in range(3)]
        assert not any(ticket.done for ticket in others)
        assert np.isnan(others[-1].start)
        assert all(ticket.wait() for ticket in others)
    tickets = [first, *others]
    assert all(ticket.ok for ticket in tickets)
    times = [at for ticket in tickets for at in (ticket.start, ticket.end)]
    assert times == sorted(times)
    assert begin <= times[0]
    assert times[-1] <= time.monotonic()
    assert first.end - first.start > 0.01


def test_a_free_thread_takes_blocks_of_the_next_transfer(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    with IoPool(2) as pool:
        first = slow(pool)
        second = pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)
        assert second.wait(30)
        assert not first.done, "the second waited for the first"
        assert first.wait()


def test_a_direction_that_is_alone_has_all_threads(slow: Callable[[IoPool], IoTicket]) -> None:
    with IoPool(2) as pool:
        first, second = slow(pool), slow(pool)
        assert first.wait(30)
        assert second.wait(30)
    assert second.start < first.end


def test_a_direction_leaves_threads_to_the_other(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(ALIGNMENT)
    with IoPool(3, kept_free=1) as pool:
        reads = [slow(pool) for _ in range(4)]
        write = pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
        assert write.wait(30)
        assert not any(read.done for read in reads), "it has waited for a read"
        assert all(read.wait(30) for read in reads)
    assert reads[1].start < reads[0].end
    assert min(reads[0].end, reads[1].end) <= reads[2].start + 1e-3, "three reads at once"
    with pytest.raises(ValueError, match=r"kept_free is 2, must be in 0\.\.1"):
        IoPool(2, kept_free=2)


def test_close_ends_threads_that_the_limit_of_a_direction_keeps_waiting(fds: list[int]) -> None:
    fds += [os.open(name, os.O_RDONLY) for name in ("/dev/urandom", "/dev/null")]
    random_file, empty_file = fds[-2:]
    memory = aligned_buffer(1 << 20)
    for _ in range(100):  # the failure must drop blocks while the third thread sleeps: about one time in ten
        pool = IoPool(3, kept_free=1)
        for _ in range(2):
            pool.read(random_file, memory.ctypes.data, len(memory), 0, len(memory))
        pool.read(empty_file, memory.ctypes.data, len(memory), 0, ALIGNMENT)  # fails at once: the file has no bytes
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "a thread was not woken"


def test_a_write_does_not_wait_for_reads_in_line(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(ALIGNMENT)
    with IoPool(2) as pool:
        reads = [slow(pool) for _ in range(4)]
        write = pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
        assert all(ticket.wait(30) for ticket in (write, *reads))
    assert write.start <= reads[2].start


def test_one_thread_takes_blocks_of_both_directions_by_turns(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory, read_into = random_buffer(64 * ALIGNMENT), aligned_buffer(64 * ALIGNMENT)
    os.ftruncate(file, 128 * ALIGNMENT)
    with IoPool(1) as pool:
        first = slow(pool)
        read = pool.read(file, read_into.ctypes.data, len(memory), 0, ALIGNMENT)
        write = pool.write(file, memory.ctypes.data, len(memory), len(memory), ALIGNMENT)
        assert all(ticket.wait(30) for ticket in (first, read, write))
    assert read.ok
    assert write.ok
    assert write.start < read.end
    assert read.start < write.end


def test_waiting_in_slices(slow: Callable[[IoPool], IoTicket]) -> None:
    slices = 0
    with IoPool(1) as pool:
        ticket = slow(pool)
        assert ticket.wait(0) is False
        assert ticket.wait(-1) is False
        while not ticket.wait(0.005):
            end = ticket.end
            assert np.isnan(end) or ticket.done, "it may have ended since"
            slices += 1
        assert ticket.wait(float("inf"))
        with pytest.raises(ValueError, match="timeout is NaN"):
            ticket.wait(float("nan"))
    assert slices >= 2
    assert ticket.end - ticket.start >= 0.005 * (slices - 1)


def test_the_interpreter_runs_while_a_wait_blocks(slow: Callable[[IoPool], IoTicket]) -> None:
    stop, times = threading.Event(), []

    def tick() -> None:
        while not stop.wait(0.001):
            times.append(time.monotonic())

    with IoPool(1) as pool:
        ticket = slow(pool)
        ticker = threading.Thread(target=tick)
        ticker.start()
        begin = time.monotonic()
        assert ticket.wait()
        end = time.monotonic()
        stop.set()
        ticker.join()
    assert end - begin > 0.02
    assert sum(begin < at < end - 0.005 for at in times) >= 3


def test_cancel_drops_what_nobody_has_begun(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    with IoPool(1) as pool:
        running = slow(pool)
        while np.isnan(running.start):
            running.wait(0.001)
        queued = pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)
        after = pool.write(file, memory.ctypes.data, len(memory), len(memory), ALIGNMENT)
        queued.cancel()
        assert queued.done
        assert (queued.ok, queued.cancelled, queued.nbytes, queued.failed_block) == (False, True, 0, -1)
        assert queued.start == queued.end
        running.cancel()
        assert running.wait()
        assert (running.ok, running.cancelled) == (True, False), "its only block had begun"
        assert after.wait(30)
        assert after.ok
        after.cancel()
        assert after.ok
    assert not any(Path(f"/proc/self/fd/{file}").read_bytes()[: len(memory)]), "a cancelled block was written"


def test_arrays_live_as_long_as_the_transfer(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory, crcs = random_buffer(ALIGNMENT), np.zeros(1, np.uint32)
    held = weakref.ref(crcs)
    with IoPool(1) as pool:
        running = slow(pool)
        pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT, crcs)
        del crcs
        assert held() is not None, "a thread will write to memory that is gone"
        assert not running.done, "it was too fast to show anything"
        last = pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
        assert last.wait(30)
        assert pool.write(file, memory.ctypes.data, ALIGNMENT, 0, ALIGNMENT).wait(30)
        assert held() is None, "arrays of transfers that ended are kept"


def test_many_python_threads_use_one_pool(file: int) -> None:
    places, size = 8, 4 * ALIGNMENT
    data, back = random_buffer(places * size), aligned_buffer(places * size)
    failed: list[IoTicket] = []
    with IoPool(3) as pool:

        def work(at: int) -> None:
            for _ in range(50):
                crcs = np.zeros(4, np.uint32)
                for move, memory in ((pool.write, data), (pool.read, back)):
                    ticket = move(file, memory.ctypes.data + at, size, at, ALIGNMENT, crcs)
                    ticket.wait()
                    failed.extend([] if ticket.ok else [ticket])

        workers = [threading.Thread(target=work, args=(place * size,)) for place in range(places)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert failed == []
    np.testing.assert_array_equal(back, data)


# Life and death


def test_close_lets_what_is_queued_end(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    pool = IoPool(2)
    assert (len(io_threads()), pool._native.num_threads) == (2, 2)
    tickets = [slow(pool), slow(pool), pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)]
    assert not tickets[2].done
    pool.close()
    pool.close()
    assert io_threads() == []
    assert all(ticket.ok for ticket in tickets)
    with pytest.raises(RuntimeError, match="this IoPool is closed"):
        pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)


def test_a_pool_that_nobody_holds_ends_what_is_queued_and_its_threads(
    file: int, slow: Callable[[IoPool], IoTicket]
) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    pool = IoPool(1)
    slow(pool)
    ticket = pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)
    del pool
    assert io_threads() == []
    assert ticket.ok


def test_the_threads_take_no_signal() -> None:
    with IoPool(2):
        for task in io_threads():
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            blocked = int(status["SigBlk"], 16)
            assert all(blocked >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_forked_child_is_told(file: int, slow: Callable[[IoPool], IoTicket]) -> None:
    memory = random_buffer(8 * ALIGNMENT)
    crcs = np.zeros(8, np.uint32)
    held = SimpleNamespace(pool=IoPool(2))
    held.tickets = [slow(held.pool), slow(held.pool)]
    held.tickets.append(held.pool.write(file, memory.ctypes.data, len(memory), 0, ALIGNMENT, crcs))

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except RuntimeError as error:
            return f"belongs to process {os.getppid()}" in str(error)
        return False

    def child() -> bool:
        told = [
            refused(lambda: held.pool.read(file, memory.ctypes.data, len(memory), 0, ALIGNMENT)),
            refused(lambda: held.tickets[-1].wait(0)),
            refused(lambda: held.tickets[-1].cancel()),
            refused(lambda: held.tickets[-1].done),
        ]
        held.pool.close()
        held.tickets.clear()
        held.pool = None
        own = aligned_buffer(ALIGNMENT)
        with IoPool(1) as new:
            done = new.read(file, own.ctypes.data, ALIGNMENT, 0, ALIGNMENT)
            return all(told) and done.wait(30) and len(io_threads()) == 1

    waiting = threading.Thread(target=held.tickets[-1].wait)
    assert held.pool.write(file, memory.ctypes.data, 0, 0, ALIGNMENT).done
    os.ftruncate(file, len(memory))
    waiting.start()
    assert all(in_child(child) for _ in range(5))
    waiting.join()
    assert all(ticket.wait(30) and ticket.ok for ticket in held.tickets)
    held.pool.close()


# Files and memory


def test_direct_where_the_disk_offers_it(tmp_path: Path, fds: list[int]) -> None:
    path = tmp_path / "file"
    fd, direct = open_direct(path, write=True, create=True)
    fds.append(fd)
    assert direct == is_direct(fd)
    assert not os.get_inheritable(fd)
    plain, direct = open_direct(path, direct=False)
    fds.append(plain)
    assert (direct, is_direct(plain)) == (False, False)
    assert not os.get_inheritable(plain)


def test_a_file_system_that_refuses_when_opening(fds: list[int]) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        os.open("/proc/version", os.O_RDONLY | os.O_DIRECT)
    fd, direct = open_direct("/proc/version")
    fds.append(fd)
    assert not direct
    size = len(Path("/proc/version").read_bytes())
    memory = aligned_buffer(size)
    with IoPool(1) as pool:
        assert pool.read(fd, memory.ctypes.data, size, 0, 1).wait(30)
    assert memory.tobytes() == Path("/proc/version").read_bytes()


def test_a_file_system_that_refuses_when_first_read(
    tmp_path: Path, fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    before = len(os.listdir("/proc/self/fd"))
    fd, direct = open_direct(tmp_path / "file", write=True, create=True)
    fds.append(fd)
    assert (direct, is_direct(fd)) == (False, False)
    assert len(os.listdir("/proc/self/fd")) == before + 1, "the direct descriptor was left open"


def test_ctrl_c_while_a_file_is_opened_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", interrupted)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        open_direct(tmp_path / "file", write=True, create=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        open_direct(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        open_direct(tmp_path / "missing", write=True)
    with pytest.raises(IsADirectoryError):
        open_direct(tmp_path, write=True)
    with pytest.raises(ValueError, match="create is True and write is False"):
        open_direct(tmp_path / "missing", create=True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 3 * MiB + 1])
def test_aligned_buffers(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (nbytes,))
    assert buffer.ctypes.data % ALIGNMENT == 0
    assert not buffer.any()
    buffer[:] = 1


def test_a_child_has_zeros_for_a_buffer_and_frees_nothing_else_with_it() -> None:
    buffers = [random_buffer(MiB)]

    def frees() -> bool:
        zeros = not buffers[0].any()
        others = [mmap.mmap(-1, MiB) for _ in range(64)]  # in a gap of the address space, if there is one
        buffers.clear()
        for other in others:
            other[:] = bytes(MiB)  # crashes where it is unmapped
        return zeros

    assert in_child(frees)
    assert buffers[0].any()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_has_bytes(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes is {nbytes}, must be 1 or more"):
        aligned_buffer(nbytes)
