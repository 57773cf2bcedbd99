# Types of the extension module that kernels/src/module.cpp defines. Use tidegate.kernels, which adds names to numbers.
from collections.abc import Sequence

from tidegate.timeline.timeline import Span

SOURCES: str

class ThreadPool:
    def __init__(self, num_threads: int, cpus: list[int]) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def close(self) -> None: ...

class IoTicket:
    def wait(self, timeout: float | None = None) -> bool: ...
    def cancel(self) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def ok(self) -> bool: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def end_of_file(self) -> bool: ...
    @property
    def checksum_mismatch(self) -> bool: ...
    @property
    def error(self) -> int: ...
    @property
    def failed_block(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...

class IoPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def read(
        self,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        block_bytes: int,
        checksums: int,
        keep: object,
        /,
    ) -> IoTicket: ...
    def write(
        self,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        block_bytes: int,
        checksums: int,
        keep: object,
        /,
    ) -> IoTicket: ...
    def close(self) -> None: ...

DIRECT_ALIGNMENT: int

def adamw_update(
    pool: ThreadPool,
    numel: int,
    weight: int,
    weight_format: int,
    aux: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: int,
    arithmetic: int,
    grad_scale: float,
    l2: float,
    decay: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    step_size: float,
    inverse_bias_correction2_sqrt: float,
    eps: float,
    /,
) -> None: ...
def stream_like(
    pool: ThreadPool,
    numel: int,
    weight: int,
    weight_format: int,
    aux: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: int,
    /,
) -> None: ...
def sum_of_squares(pool: ThreadPool, address: int, numel: int, dtype: int, /) -> tuple[float, int]: ...
def accumulate(pool: ThreadPool, sums: int, sum_dtype: int, address: int, dtype: int, numel: int, /) -> None: ...
def copy(dst: int, src: int, nbytes: int, /) -> None: ...
def fill(dst: int, byte: int, nbytes: int, /) -> None: ...
def instruction_sets() -> list[str]: ...
def current_instruction_set() -> int: ...
def use_instruction_set(isa: int, /) -> None: ...
def crc32c(address: int, nbytes: int, seed: int, /) -> int: ...
def exposed_waits(
    spans: Sequence[Span], deps: dict[int, tuple[int, ...]], low: float, high: float, /
) -> dict[str, float]: ...
