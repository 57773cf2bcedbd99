"""Claim: native direct I/O has at least the throughput of fio on the same disk.

The bench measures reads, writes and an equal mix of both. Tidegate and fio have one file each in the same folder, and
the same block size and queue depth (number of blocks in flight). Tidegate has one native thread for each block in
flight, in three variants: `tidegate` with ordinary pages, like fio; `tidegate_checksums`, which also computes or
verifies the CRC-32C of each block; `tidegate_huge_pages`, with checksums and `aligned_buffer`, as in the engine. fio
runs with the I/O engines psync (one thread for each block in flight), libaio and io_uring.

A share is Tidegate's throughput divided by that of fio in the same round, with psync or libaio, whichever is faster by
its median. `io_uring_by_tidegate` is the throughput of fio with io_uring divided by Tidegate's. Each round measures all
of them, so that a throttled disk affects all alike. The start time of fio is not counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidegate import kernels
from tidegate.kernels import IoPool, IoTicket, aligned_buffer, open_direct

MODES = {"read": "read", "write": "write", "mixed": "rw"}  # ours: fio's
ENGINES = ("psync", "libaio", "io_uring")
YARDSTICKS = ("fio_psync", "fio_libaio")
QUEUED_DEPTHS = 4  # blocks queued by blocks that move
MIB = 1 << 20
Run = Callable[[str], float]  # of a mode: bytes a second


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes and the duration that all measurements share. depth: number of blocks in flight."""

    file_bytes: int
    block_bytes: int
    depth: int
    seconds: float

    @property
    def buffer_bytes(self) -> int:
        return self.depth * self.block_bytes


class Ours:
    """Measures Tidegate's direct I/O. The content of the file is that of one buffer, repeated, so that the checksum of
    every block is known at any time.

    The buffer has space for all blocks in flight, as in fio, and all transfers of a measurement use it. Every
    measurement allocates a new buffer, as fio does, because the speed depends on the memory pages: if they happen to be
    adjacent, the disk gets fewer and larger requests.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        self.shape = shape
        self.content = np.frombuffer(np.random.default_rng(0).bytes(shape.buffer_bytes), np.uint8)
        starts = range(self.content.ctypes.data, self.content.ctypes.data + shape.buffer_bytes, shape.block_bytes)
        self.checksums = np.array([kernels.crc32c(at, shape.block_bytes) for at in starts], np.uint32)
        self.pool = IoPool(shape.depth)
        self.fd, direct = open_direct(path, write=True, create=True)
        if not direct:
            raise SystemExit(f"{path.parent} is on a file system without O_DIRECT: give another --directory")
        buffer = self.filled(aligned_buffer)
        for offset in range(0, shape.file_bytes, shape.buffer_bytes):
            settled(self.pool.write(self.fd, buffer.ctypes.data, len(buffer), offset, shape.block_bytes))

    def close(self) -> None:
        self.pool.close()
        os.close(self.fd)

    def filled(self, allocate: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        buffer = allocate(self.shape.buffer_bytes)
        buffer[:] = self.content
        return buffer

    def rate(self, mode: str, allocate: Callable[[int], NDArray[np.uint8]], checksums: bool = False) -> float:
        """Measures the throughput in bytes per second. mode: `read`, `write` or `mixed`. allocate: function that
        allocates the buffer. checksums: whether checksums of blocks are computed or verified.

        One transfer has the size of the buffer; in mode `mixed`, of one block. The queue always has enough transfers
        for all threads.
        """
        buffer = self.filled(allocate)
        begin, end, moved = float("inf"), 0.0, 0
        stop, in_flight = time.monotonic() + self.shape.seconds, deque[IoTicket]()
        blocks = 1 if mode == "mixed" else self.shape.depth
        for begin_transfer in self.transfers(mode, buffer.ctypes.data, blocks, checksums):
            running = time.monotonic() < stop
            if running:
                in_flight.append(begin_transfer())
            if not in_flight:
                break
            if not running or len(in_flight) * blocks >= QUEUED_DEPTHS * self.shape.depth:
                ticket = settled(in_flight.popleft())
                begin, end, moved = min(begin, ticket.start), max(end, ticket.end), moved + ticket.nbytes
        return moved / (end - begin)

    def transfers(self, mode: str, memory: int, blocks: int, checksums: bool) -> Iterator[Callable[[], IoTicket]]:
        """Endless iterator of functions, each of which starts one transfer of `blocks` blocks. The transfers go
        through the file from start to end, then from the start again. In mode `mixed` reads and writes alternate."""
        size = blocks * self.shape.block_bytes
        moves = {"read": [self.pool.read], "write": [self.pool.write], "mixed": [self.pool.read, self.pool.write]}[mode]
        for i, move in enumerate(cycle(moves)):
            part = i * blocks % self.shape.depth
            known = self.checksums[part : part + blocks]
            crcs = None if not checksums else known if move == self.pool.read else np.empty_like(known)
            at = memory + part * self.shape.block_bytes
            yield partial(move, self.fd, at, size, i * size % self.shape.file_bytes, self.shape.block_bytes, crcs)


def small_pages(nbytes: int) -> NDArray[np.uint8]:
    """Memory with ordinary (not huge) pages, as fio has."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    buffer: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return buffer


def settled(ticket: IoTicket) -> IoTicket:
    ticket.wait()
    if not ticket.ok:
        raise SystemExit(f"a transfer failed: {os.strerror(ticket.error)}; wrong checksum: {ticket.checksum_mismatch}")
    return ticket


def fio_rate(engine: str, path: Path, shape: Shape, mode: str) -> float:
    """Bytes per second of fio in this mode. Synchronous engines get a thread, and a part of the file, for each block in
    flight."""
    jobs = shape.depth if engine == "psync" else 1
    options = {
        "name": engine,
        "filename": path,
        "ioengine": engine,
        "rw": MODES[mode],
        "bs": shape.block_bytes,
        "size": shape.file_bytes // jobs,
        "offset_increment": shape.file_bytes // jobs,
        "numjobs": jobs,
        "iodepth": shape.depth // jobs,
        "runtime": f"{shape.seconds * 1000:.0f}ms",
    }
    flags = ["--direct=1", "--thread", "--time_based", "--group_reporting", "--fallocate=none", "--output-format=json"]
    command = ["fio", *(f"--{key}={value}" for key, value in options.items()), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def usable_engines(path: Path, shape: Shape) -> tuple[list[str], str | None]:
    """The engines of fio that work here, and a note about those that do not, or None."""
    if shutil.which("fio") is None:
        return [], "fio is not installed"
    brief, works, notes = Shape(**(vars(shape) | {"seconds": 0.1})), [], []
    for engine in ENGINES:
        try:
            fio_rate(engine, path, brief, "write")
            works.append(engine)
        except subprocess.CalledProcessError as error:
            notes.append(f"fio's {engine} ended with {error.returncode}")
    return works, "; ".join(notes) or None


Rates = dict[str, dict[str, list[float]]]  # by mode and side


def interleaved(runs: dict[str, Run], rounds: int, seconds: float) -> Rates:
    """Measures each function of `runs` in each mode, and returns its throughputs in bytes per second, by mode and name.
    Each round calls every function once, in random order. Stops after `rounds` rounds or, after at least three of
    them, when `seconds` have passed."""
    rates: Rates = {mode: {name: [] for name in runs} for mode in MODES}
    shuffle, end = random.Random(0).shuffle, time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        for mode in MODES:
            names = list(runs)
            shuffle(names)
            for name in names:
                rates[mode][name].append(runs[name](mode))
    return rates


def spread(values: list[float], digits: int) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, digits), "quartile_low": round(low, digits), "quartile_high": round(high, digits)}


def ratios(of: dict[str, list[float]], name: str, by: list[str]) -> dict[str, float] | None:
    """Median and quartiles over rounds of a ratio: the throughput of `name` divided by that of the fastest of `by` (the
    one with the highest median). of: throughputs of the rounds, by name. None if `name` or all of `by` are missing."""
    present = [other for other in by if other in of]
    if name not in of or not present:
        return None
    yardstick = max(present, key=lambda other: statistics.median(of[other]))
    return spread([ours / theirs for ours, theirs in zip(of[name], of[yardstick], strict=True)], 4)


def result(rates: Rates) -> dict[str, object]:
    spreads = {
        f"{mode}_{label}": ratios(of, name, by)
        for mode, of in rates.items()
        for label, name, by in (
            ("share", "tidegate", list(YARDSTICKS)),
            ("share_with_checksums", "tidegate_checksums", list(YARDSTICKS)),
            ("share_with_checksums_and_huge_pages", "tidegate_huge_pages", list(YARDSTICKS)),
            ("io_uring_by_tidegate", "fio_io_uring", ["tidegate"]),
        )
    }
    mib = {
        mode: {name: spread([v / MIB for v in values], 1) for name, values in of.items()} for mode, of in rates.items()
    }
    medians = {key: None if value is None else value["median"] for key, value in spreads.items()}
    return {**medians, "spread": spreads, "mib_per_second": mib}


def measure(folder: Path, shape: Shape, rounds: int, seconds: float) -> dict[str, object]:
    ours, theirs = Ours(folder / "ours", shape), folder / "theirs"
    shutil.copyfile(folder / "ours", theirs)  # written, so that no side allocates
    os.sync()
    engines, note = usable_engines(theirs, shape)
    runs: dict[str, Run] = {
        "tidegate": partial(ours.rate, allocate=small_pages),
        "tidegate_checksums": partial(ours.rate, allocate=small_pages, checksums=True),
        "tidegate_huge_pages": partial(ours.rate, allocate=aligned_buffer, checksums=True),
        **{f"fio_{engine}": partial(fio_rate, engine, theirs, shape) for engine in engines},
    }
    rates = interleaved(runs, rounds, seconds)
    ours.close()
    return {
        **result(rates),
        **vars(shape),
        "rounds": len(rates["read"]["tidegate"]),
        "crc32c_gib_per_second": round(crc32c_rate() / (1 << 30), 1),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "note": note,
    }


def crc32c_rate() -> float:
    """Bytes per second of the CRC-32C on one core, for data in its caches; the best of many runs."""
    block, times = aligned_buffer(MIB // 4), []
    block[:] = 1  # pages of its own: untouched ones are all the same page
    for _ in range(200):
        begin = time.perf_counter()
        kernels.crc32c(block.ctypes.data, len(block))
        times.append(time.perf_counter() - begin)
    return len(block) / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure; a folder in it is used")
    parser.add_argument("--file-mib", type=int, default=1024, help="of each of the two files")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4, help="blocks in flight; our threads")
    parser.add_argument("--each", type=float, default=1.5, help="seconds of one measurement")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=360.0, help="begin no round after this long, but do three")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    block_bytes = options.block_kib << 10
    whole = options.depth**2 * block_bytes  # a part for each of fio's threads, of whole buffers
    file_bytes = -(-options.file_mib * MIB // whole) * whole
    shape = Shape(file_bytes=file_bytes, block_bytes=block_bytes, depth=options.depth, seconds=options.each)
    if not options.json:
        print(
            f"two files of {file_bytes / MIB:.0f} MiB in {options.directory.resolve()} ...", file=sys.stderr, flush=True
        )
    with tempfile.TemporaryDirectory(prefix="direct-io-", dir=options.directory) as folder:
        print(json.dumps(measure(Path(folder), shape, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()
