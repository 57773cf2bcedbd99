"""Updates and sums of squares in plain torch operations: for rules without other kernels, and for GPUs where Triton is
not installed.

An update makes many passes over memory instead of one. It is not guaranteed that torch's square root and division are
rounded correctly (on some CPUs the fp32 square root is not). So results agree with those of other kernels within fp32
rounding, not bit for bit. Conversions of 16-bit formats are exact. The sum of squares is added in torch's order, and
agrees within fp64 rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidegate.kernels.arithmetic.device_calls import GradRef, Update
from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat

CHUNK_NUMEL = 1 << 22
"""Elements that are updated at a time; this limits temporary tensors to about 100 MiB."""
GRAD_DTYPES = {GradDtype.F32: torch.float32, GradDtype.BF16: torch.bfloat16, GradDtype.F16: torch.float16}

TorchStep = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Any], torch.Tensor]
"""The arithmetic of a rule: `step(weight, grad, tensors, scalars)` returns the new weight, and changes the state
tensors in place. Weight and gradient are fp32, and are not changed. No operation should use a fused factor (`alpha`,
`value`), because a device might round product and sum together."""


@dataclass(frozen=True)
class TorchKernels:
    """The updates of one rule in torch operations, on a GPU or on the CPU.

    step: the arithmetic of the rule. dtypes: the dtypes of its state tensors. device_type: "cuda" or "cpu".
    """

    step: TorchStep
    dtypes: tuple[torch.dtype, ...]
    device_type: str = "cuda"

    def update(self, runs: Sequence[Update]) -> None:
        """Enqueues the updates of `runs` in order."""
        with torch.no_grad():
            for run in runs:
                for begin, numel in _chunks(run.numel):
                    self._update_chunk(run, begin, numel)

    def _update_chunk(self, run: Update, begin: int, numel: int) -> None:
        """Updates `numel` elements from `begin` on."""

        def at(address: int, dtype: torch.dtype) -> torch.Tensor:
            return wrap(address + begin * dtype.itemsize, numel, dtype, self.device_type)

        tensors = [at(address, dtype) for address, dtype in zip(run.tensors, self.dtypes, strict=True)]
        grad = at(run.grad, GRAD_DTYPES[run.grad_dtype]).float()
        if run.weight_format is WeightFormat.BF16_REMAINDER:
            hi, lo = at(run.weight, torch.int16), at(run.aux, torch.int16)
            bits = _tamed_bits(self.step(((hi.int() << 16) + lo.int()).view(torch.float32), grad, tensors, run.scalars))
            hi.copy_(_bf16_of(bits))
            lo.copy_((bits << 16) >> 16)
            return
        where = run.weight if run.weight_format is WeightFormat.F32 else run.aux
        master = at(where, torch.float32)
        master.copy_(self.step(master, grad, tensors, run.scalars))
        if run.weight_format is WeightFormat.F16_MASTER:
            at(run.weight, torch.float16).copy_(master)
        elif run.weight_format is WeightFormat.BF16_MASTER:
            at(run.weight, torch.int16).copy_(_bf16_of(_tamed_bits(master)))

    def sum_of_squares(self, refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
        """Enqueues, for each gradient, the fp64 sum of squares of its finite elements, and the number of non-finite
        ones.

        out_sums, out_bad: fp64 and int64 tensors on the device, one element for each of `refs`.
        """
        out_sums.zero_()
        out_bad.zero_()
        with torch.no_grad():
            for i, ref in enumerate(refs):
                for begin, numel in _chunks(ref.numel):
                    address = ref.address + begin * ref.dtype.nbytes
                    values = wrap(address, numel, GRAD_DTYPES[ref.dtype], out_sums.device.type).double()
                    finite = values.isfinite()
                    out_sums[i] += values.where(finite, 0.0).square_().sum()
                    out_bad[i] += (~finite).sum()


def wrap(address: int, numel: int, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """The `numel` elements at `address` as a tensor that does not own its memory; the memory must outlive the
    tensor."""
    if device_type == "cuda":
        return torch.as_tensor(CudaMemory(address, numel * dtype.itemsize), device="cuda").view(dtype)
    if device_type != "cpu":
        raise ValueError(f"device_type is {device_type!r}, must be 'cpu' or 'cuda'")
    return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


class CudaMemory:
    """Bytes on a GPU with the CUDA array interface, from which torch makes a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, numel, CHUNK_NUMEL):
        yield begin, min(CHUNK_NUMEL, numel - begin)


def _tamed_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 values as int32. Every NaN is replaced by a quiet NaN whose low 16 bits are 0. So a NaN stays a
    NaN when it is rounded to bf16, and its remainder is 0."""
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), (bits | 0x00400000) & -0x10000, bits)


def _bf16_of(tamed: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to bf16 (nearest, ties away from zero), as int16 bits. `tamed`: the fp32 values as returned
    by `_tamed_bits`."""
    return ((tamed + 0x8000) >> 16).short()
