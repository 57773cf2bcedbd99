"""The CPU kernels: Python API of the native code (sum of squares, accumulation, copies, checksums, I/O), and the
implementations of update rules.

Arrays are given by address and number of elements. The interpreter lock is released while native code runs, and
results do not depend on the number of threads, the instruction set or the caller's floating-point mode. The sign and
payload of NaN results are not specified.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tidegate.kernels import _native
from tidegate.kernels._native import PathLock
from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat
from tidegate.kernels.built_from import require_current_build
from tidegate.kernels.io.direct_io import ALIGNMENT, IoPool, IoTicket, aligned_buffer, num_blocks, open_direct
from tidegate.rules.rule import find

if TYPE_CHECKING:
    from tidegate.kernels.arithmetic.implementation import Implementation

__all__ = [
    "ALIGNMENT",
    "GradDtype",
    "IoPool",
    "IoTicket",
    "PathLock",
    "ThreadPool",
    "WeightFormat",
    "accumulate",
    "aligned_buffer",
    "copy",
    "crc32c",
    "fill",
    "implementation",
    "instruction_set",
    "instruction_sets",
    "num_blocks",
    "open_direct",
    "sum_of_squares",
    "use_instruction_set",
]

require_current_build()


class ThreadPool:
    """A pool of native threads for kernel calls.

    num_threads: number of threads that work on a call, including the calling thread: num_threads - 1 are started.
    cpus: CPUs on which the started threads may run; None for all; ValueError for a CPU that this process may not use.
    The CPU of the calling thread is not changed.

    Calls from several threads run one after another. After `close`, and in a forked child, the calling thread works
    alone.
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        self._native = _native.ThreadPool(num_threads, list(cpus or ()))

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        self._native.close()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def implementation(name: str) -> Implementation:
    """How the update rule of this name computes. Raises ConfigError if there is no such rule."""
    found: Implementation = importlib.import_module(f"{__name__}.{find(name).name}").IMPLEMENTATION
    return found


def sum_of_squares(pool: ThreadPool, address: int, numel: int, dtype: GradDtype) -> tuple[float, int]:
    """The fp64 sum of the squares of all finite elements, and the number of elements that are not finite.

    Elements are summed in blocks of 65536, and the blocks in a fixed tree: call this on a whole parameter to get a norm
    that does not depend on how the parameter is cut into subgroups.
    """
    return _native.sum_of_squares(pool._native, address, numel, dtype)


def accumulate(pool: ThreadPool, sums: int, sum_dtype: GradDtype, address: int, dtype: GradDtype, numel: int) -> None:
    """Adds the gradient at `address` to `sums`, element by element. Additions are in fp32; a 16-bit sum is then rounded
    to nearest, ties to even, as torch does in `.grad`.
    """
    _native.accumulate(pool._native, sums, sum_dtype, address, dtype, numel)


def copy(dst: int, src: int, nbytes: int) -> None:
    """Copies `nbytes` bytes from address `src` to address `dst`; both ranges must not overlap.
    Large copies bypass the cache."""
    _native.copy(dst, src, nbytes)


def fill(dst: int, byte: int, nbytes: int) -> None:
    """Sets `nbytes` bytes at address `dst` to the value `byte` (0 to 255)."""
    _native.fill(dst, byte, nbytes)


def crc32c(address: int, nbytes: int, seed: int = 0) -> int:
    """The CRC-32C (Castagnoli) checksum of `nbytes` bytes at `address`. For b"123456789" it is 0xE3069283.

    seed: the checksum of the preceding bytes, to continue a checksum over several calls.
    """
    return _native.crc32c(address, nbytes, seed)


def instruction_sets() -> list[str]:
    """The instruction sets for which the loops were compiled and which this CPU has, of "baseline", "avx2" and
    "avx512"; the widest is last."""
    return _native.instruction_sets()


def instruction_set() -> str:
    """The active instruction set: the widest, unless `use_instruction_set` chose another."""
    return instruction_sets()[_native.current_instruction_set()]


def use_instruction_set(name: str) -> None:
    """Selects the instruction set `name` for all loops of this process, for tests and benchmarks; results are the
    same."""
    offered = instruction_sets()
    if name not in offered:
        raise ValueError(f"instruction set {name!r} is not available on this CPU; available are {', '.join(offered)}")
    _native.use_instruction_set(offered.index(name))
