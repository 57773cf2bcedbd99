"""The CPU kernels: named formats and scalars in front of the native code.

Arrays are given by address and number of elements. The interpreter lock is released while native code runs, and
results do not depend on the number of threads, the instruction set or the caller's floating-point mode. A NaN is a
NaN: its sign and payload are not part of the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from tidegate.kernels import _native
from tidegate.kernels.arithmetic.scalars import Arithmetic, GradDtype, Scalars, WeightFormat, scalars
from tidegate.kernels.built_from import require_current
from tidegate.kernels.io.direct_io import ALIGNMENT, IoPool, IoTicket, aligned_buffer, num_blocks, open_direct

__all__ = [
    "ALIGNMENT",
    "Arithmetic",
    "GradDtype",
    "IoPool",
    "IoTicket",
    "Scalars",
    "ThreadPool",
    "WeightFormat",
    "accumulate",
    "adamw_update",
    "aligned_buffer",
    "copy",
    "crc32c",
    "fill",
    "instruction_set",
    "instruction_sets",
    "num_blocks",
    "open_direct",
    "scalars",
    "stream_like",
    "sum_of_squares",
    "use_instruction_set",
]

require_current()


class ThreadPool:
    """Threads that wait for kernel calls.

    num_threads: threads that work on a call, the calling one included: num_threads - 1 are started.
    cpus: where started threads may run, ValueError for one this process may not use; None for anywhere. The calling
    thread stays where it is.

    Calls from several threads take turns. After `close`, and in a forked child, the calling thread works alone.
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        self._native = _native.ThreadPool(num_threads, list(cpus or ()))

    @property
    def num_threads(self) -> int:
        return self._native.num_threads

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        self._native.close()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def adamw_update(
    pool: ThreadPool,
    numel: int,
    weight: int,
    weight_format: WeightFormat,
    aux: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: GradDtype,
    scalars: Scalars,
) -> None:
    """One AdamW (or Adam) update of `numel` elements, in place; equals `oracle.adamw_update` bit for bit.

    weight, aux, exp_avg, exp_avg_sq, grad: addresses. `aux` is the int16 remainder or the fp32 master, 0 for F32.
    """
    native = pool._native
    _native.adamw_update(
        native, numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype,
        scalars.arithmetic, *scalars.as_tuple(),
    )  # fmt: skip


def stream_like(
    pool: ThreadPool,
    numel: int,
    weight: int,
    weight_format: WeightFormat,
    aux: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: GradDtype,
) -> None:
    """Reads and writes what `adamw_update` does, with no arithmetic: what the memory of this machine allows.

    Changes nothing.
    """
    _native.stream_like(pool._native, numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype)


def sum_of_squares(pool: ThreadPool, address: int, numel: int, dtype: GradDtype) -> tuple[float, int]:
    """The fp64 sum of the squares of all finite elements, and the count of the others.

    Blocks of 65536 elements and a fixed tree over them: call it on a whole parameter for a norm that does not depend
    on how the parameter is cut into subgroups.
    """
    return _native.sum_of_squares(pool._native, address, numel, dtype)


def accumulate(pool: ThreadPool, sums: int, sum_dtype: GradDtype, address: int, dtype: GradDtype, numel: int) -> None:
    """Adds the gradient at `address` to `sums`, element by element; equals `oracle.accumulate` bit for bit.

    Each addition is one of fp32; a sum of 16 bits is then rounded to nearest, ties to even: as torch adds into `.grad`.
    """
    _native.accumulate(pool._native, sums, sum_dtype, address, dtype, numel)


def copy(dst: int, src: int, nbytes: int) -> None:
    """Copies `nbytes` between two places that do not overlap."""
    _native.copy(dst, src, nbytes)


def fill(dst: int, byte: int, nbytes: int) -> None:
    """Sets `nbytes` to `byte` (0 to 255)."""
    _native.fill(dst, byte, nbytes)


def crc32c(address: int, nbytes: int, seed: int = 0) -> int:
    """The CRC-32C (Castagnoli) of `nbytes` at `address`: that of b"123456789" is 0xE3069283.

    seed: the checksum of what stands before, to go on from there.
    """
    return _native.crc32c(address, nbytes, seed)


def instruction_sets() -> list[str]:
    """What the loops were compiled for and this CPU offers, of "baseline", "avx2" and "avx512"; the widest is last."""
    return _native.instruction_sets()


def instruction_set() -> str:
    """What the loops run with: the widest, unless `use_instruction_set` chose another."""
    return instruction_sets()[_native.current_instruction_set()]


def use_instruction_set(name: str) -> None:
    """Makes every loop of this process run with `name`: for tests and comparisons, results are the same."""
    offered = instruction_sets()
    if name not in offered:
        raise ValueError(f"instruction set {name!r} is not offered here, only {', '.join(offered)}")
    _native.use_instruction_set(offered.index(name))
