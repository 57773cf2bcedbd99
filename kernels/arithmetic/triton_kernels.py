"""The sum of squares on a GPU, and what updates have in common, in Triton: equal to `oracle` bit for bit.

Importing this module raises ImportError if Triton is missing or too old; `torch_kernels` works without Triton. Arrays
are given by address on the current device, and work is enqueued on torch's current stream. Offsets have 64 bits.
Integers are i64 and are never specialised by value: a kernel is compiled once for each set of its constants.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tidegate.kernels.arithmetic.device_calls import GradRef
from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat
from tidegate.kernels.arithmetic.oracle import BLOCK_NUMEL, NUM_ACCUMULATORS

# Compilers of older versions flush denormals in square roots and divisions, without an option to prevent it.
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    raise ImportError(f"Triton {triton.__version__} flushes denormals: 3.6 or newer is needed")

F32, BF16, F16 = (tl.constexpr(int(dtype)) for dtype in GradDtype)
F32_WEIGHT, BF16_REMAINDER, F16_MASTER, BF16_MASTER = (tl.constexpr(int(form)) for form in WeightFormat)
ACCUMULATORS = tl.constexpr(NUM_ACCUMULATORS)

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of all kernels. They forbid the compiler to fuse a × b + c, so that product and sum are each rounded.
tests/kernels/arithmetic/test_triton.py checks the compiled code."""
BLOCKS_PER_PROGRAM = 2
"""Number of blocks whose squares one program sums. Each block has sixteen accumulators, so that the accumulators of
two blocks fill one warp (32 threads)."""
ROWS_AT_ONCE = 16
"""Number of loads of a block that are in flight at the same time, to hide the memory latency. The additions cannot be
reordered to hide it."""
LEAVES = 1024
"""Number of block sums that one tree of additions sums. A further tree sums the results of up to LEAVES such trees, so
a parameter may have up to LEAVES² blocks (69 · 10⁹ elements)."""


def sum_of_squares(refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
    """Enqueues, for each gradient, the fp64 sum of squares of its finite elements, and the number of non-finite ones.

    out_sums, out_bad: contiguous fp64 and int64 tensors on the device, one element for each of `refs`.
    """
    if not refs:
        return
    order = sorted(range(len(refs)), key=lambda i: refs[i].dtype)
    counts = np.array([-(-refs[i].numel // BLOCK_NUMEL) for i in order], np.int64)
    assert counts.max() <= LEAVES**2
    ends = np.cumsum(counts)
    num_blocks, starts = int(ends[-1]), ends - counts
    table = _to_device(np.concatenate([_block_table([refs[i] for i in order]), starts, counts, order]), out_sums.device)
    sums = torch.empty(num_blocks, dtype=torch.float64, device=out_sums.device)
    bad = torch.empty(num_blocks, dtype=torch.int32, device=out_sums.device)
    for dtype in GradDtype:
        places = [k for k, i in enumerate(order) if refs[i].dtype is dtype]
        begin, end = (int(starts[places[0]]), int(ends[places[-1]])) if places else (0, 0)
        if begin == end:
            continue
        _block_sums[(triton.cdiv(end - begin, BLOCKS_PER_PROGRAM),)](
            table, num_blocks, begin, end, sums, bad,
            GRAD=int(dtype), BLOCKS=BLOCKS_PER_PROGRAM, ROWS=ROWS_AT_ONCE, num_warps=1, **EXACT,
        )  # fmt: skip
    _trees[(len(refs),)](
        table, 2 * num_blocks, len(refs), sums, bad, out_sums, out_bad,
        LEAVES=LEAVES, LEVELS=LEAVES.bit_length() - 1, num_warps=4, **EXACT,
    )  # fmt: skip


def _block_table(refs: Sequence[GradRef]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A table with the addresses of all blocks, followed by the number of elements of each block."""
    firsts = [np.arange(0, ref.numel, BLOCK_NUMEL, dtype=np.int64) for ref in refs]
    addresses = [ref.address + first * ref.dtype.nbytes for ref, first in zip(refs, firsts, strict=True)]
    numels = [np.minimum(ref.numel - first, BLOCK_NUMEL) for ref, first in zip(refs, firsts, strict=True)]
    return np.concatenate([*addresses, *numels])


def _to_device(table: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> torch.Tensor:
    """A copy of `table` on `device`, made from pinned memory: otherwise the host would wait for the stream."""
    host = torch.from_numpy(table)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@triton.jit
def at(address, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to element `index` of the array at `address`. ALIGNED: the address is a multiple of 16. The compiler
    forgets this when the integer is cast to a pointer, so it is stated again."""
    pointer = address.to(tl.int64).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + index


@triton.jit
def _tamed_bits(x):
    """The bits of fp32 values as uint32. Every NaN is replaced by a quiet NaN whose low 16 bits are 0. So a NaN stays a
    NaN when it is rounded to bf16, and its remainder is 0."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, (bits | 0x00400000) & 0xFFFF0000, bits)


@triton.jit
def _bf16_of(tamed):
    """fp32 values rounded to bf16 (nearest, ties away from zero), as uint16 bits. `tamed`: the fp32 values as returned
    by `_tamed_bits`."""
    return ((tamed + 0x8000) >> 16).to(tl.uint16)


@triton.jit
def load_gradient(address, index, mask, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    if GRAD == BF16:
        halves = tl.load(at(address, index, tl.uint16, ALIGNED), mask=mask)
        gradient = (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif GRAD == F16:
        gradient = tl.load(at(address, index, tl.float16, ALIGNED), mask=mask).to(tl.float32)
    else:
        gradient = tl.load(at(address, index, tl.float32, ALIGNED), mask=mask)
    return gradient


@triton.jit
def load_weight(weight, aux, index, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    if FORMAT == BF16_REMAINDER:
        hi = tl.load(at(weight, index, tl.uint16, ALIGNED), mask=mask)
        lo = tl.load(at(aux, index, tl.int16, ALIGNED), mask=mask)
        bits = (hi.to(tl.uint32) << 16) + lo.to(tl.int32).to(tl.uint32, bitcast=True)
        master = bits.to(tl.float32, bitcast=True)
    elif FORMAT == F32_WEIGHT:
        master = tl.load(at(weight, index, tl.float32, ALIGNED), mask=mask)
    else:
        master = tl.load(at(aux, index, tl.float32, ALIGNED), mask=mask)
    return master


@triton.jit
def store_weight(weight, aux, index, mask, p, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    if FORMAT == F32_WEIGHT:
        tl.store(at(weight, index, tl.float32, ALIGNED), p, mask=mask)
    elif FORMAT == BF16_REMAINDER:
        bits = _tamed_bits(p)
        tl.store(at(weight, index, tl.uint16, ALIGNED), _bf16_of(bits), mask=mask)
        tl.store(at(aux, index, tl.uint16, ALIGNED), (bits & 0xFFFF).to(tl.uint16), mask=mask)
    else:
        if FORMAT == F16_MASTER:
            tl.store(at(weight, index, tl.float16, ALIGNED), p.to(tl.float16), mask=mask)
        else:
            tl.store(at(weight, index, tl.uint16, ALIGNED), _bf16_of(_tamed_bits(p)), mask=mask)
        tl.store(at(aux, index, tl.float32, ALIGNED), p, mask=mask)


@triton.jit(do_not_specialize=["table", "num_blocks", "begin", "end", "sums", "bad"])
def _block_sums(
    table, num_blocks: tl.int64, begin: tl.int64, end: tl.int64, sums, bad,
    GRAD: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Kernel that computes the sum of squares and the number of non-finite elements of the blocks `begin` to `end`.

    The order of additions is fixed: accumulator j of a block adds the elements j, j + 16, …; then the upper half of the
    16 accumulators is added to the lower half, and so on, until one is left.
    """
    lane = tl.arange(0, BLOCKS * ACCUMULATORS)
    block = begin + tl.program_id(0) * BLOCKS + lane // ACCUMULATORS
    live = block < end
    address = tl.load(table + block, mask=live, other=0)
    numel = tl.load(table + num_blocks + block, mask=live, other=0).to(tl.int32)
    sum_of = tl.zeros((BLOCKS * ACCUMULATORS,), tl.float64)
    bad_of = tl.zeros((BLOCKS * ACCUMULATORS,), tl.int32)
    rows = (tl.max(numel, axis=0) + ACCUMULATORS - 1) // ACCUMULATORS
    for row in range(0, rows, ROWS):
        for k in tl.static_range(ROWS):
            index = (row + k) * ACCUMULATORS + lane % ACCUMULATORS
            inside = index < numel
            gradient = load_gradient(address, index, inside, GRAD, False)
            finite = (gradient.to(tl.uint32, bitcast=True) & 0x7F800000) != 0x7F800000
            value = tl.where(inside & finite, gradient, 0.0).to(tl.float64)
            sum_of = sum_of + value * value
            bad_of = bad_of + (inside & (finite == 0)).to(tl.int32)
    for k in tl.static_range(4):
        sum_of = tl.sum(tl.reshape(sum_of, (BLOCKS, 2, 8 >> k)), axis=1)
        bad_of = tl.sum(tl.reshape(bad_of, (BLOCKS, 2, 8 >> k)), axis=1)
    mine = begin + tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(sums + mine, tl.reshape(sum_of, (BLOCKS,)), mask=mine < end)
    tl.store(bad + mine, tl.reshape(bad_of, (BLOCKS,)), mask=mine < end)


@triton.jit
def _tree(leaves, LEAVES: tl.constexpr, LEVELS: tl.constexpr):
    """Sums the leaves in a tree of adjacent pairs. Missing leaves are 0, which does not change a sum of squares, so
    that a leaf without a partner moves to the next level unchanged."""
    for k in tl.static_range(LEVELS):
        leaves = tl.sum(tl.reshape(leaves, (LEAVES >> (k + 1), 2)), axis=1)
    return tl.sum(leaves, axis=0)


@triton.jit(do_not_specialize=["table", "first", "num_refs", "sums", "bad", "out_sums", "out_bad"])
def _trees(
    table, first: tl.int64, num_refs: tl.int64, sums, bad, out_sums, out_bad, LEAVES: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Kernel with one program per gradient, which sums the gradient's block sums: each group of LEAVES block sums in a
    tree of additions, then the results of the groups in a further tree."""
    ref = tl.program_id(0)
    start = tl.load(table + first + ref)
    count = tl.load(table + first + num_refs + ref)
    place = tl.load(table + first + 2 * num_refs + ref)
    leaf = tl.arange(0, LEAVES)
    roots = tl.zeros((LEAVES,), tl.float64)
    total_bad = tl.zeros((LEAVES,), tl.int64)
    for chunk in range(tl.cdiv(count, LEAVES)):
        block = chunk * LEAVES + leaf
        leaves = tl.load(sums + start + block, mask=block < count, other=0.0)
        roots = tl.where(leaf == chunk, _tree(leaves, LEAVES, LEVELS), roots)
        total_bad += tl.load(bad + start + block, mask=block < count, other=0).to(tl.int64)
    tl.store(out_sums + place, _tree(roots, LEAVES, LEVELS))
    tl.store(out_bad + place, tl.sum(total_bad, axis=0))
